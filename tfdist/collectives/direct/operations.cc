// The two operations of the transport as TensorFlow sees them, and what Python calls by ctypes.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "transport.h"

namespace tfdist {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::CancellationToken;
using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// TensorFlow leaves out operations whose outputs nobody uses, and runs those with constant inputs
// while it optimizes a graph, unless they say that they have an effect. Those that say so run one
// after the other, unless each is an effect on a resource of its own: that is all that the ticket
// is for.
REGISTER_OP("TfdistSend")
    .Input("ticket: resource")
    .Input("tensors: N * T")
    .Output("sent: N * T")
    .Attr("N: int >= 1")
    .Attr("T: type")
    .Attr("to: list(int)")
    .Attr("tag: string")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      for (int i = 1; i < context->num_inputs(); ++i) context->set_output(i - 1, context->input(i));
      return absl::OkStatus();
    })
    .Doc("Sends a tensor to each of some ranks, and passes them on.");

REGISTER_OP("TfdistReceive")
    .Input("ticket: resource")
    .Input("after: T")
    .Output("received: dtype")
    .Attr("T: type")
    .Attr("dtype: type")
    .Attr("shape: shape")
    .Attr("source: int")
    .Attr("tag: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ExplicitShape)
    .Doc("Returns the next tensor of this tag from a rank; `after` only says when to begin.");

absl::Status Named(const std::string& tag, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), tag + ": " + std::string(status.message()));
}

class SendKernel : public OpKernel {
 public:
  explicit SendKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("to", &to_));
    OP_REQUIRES_OK(context, context->GetAttr("tag", &tag_));
    OP_REQUIRES(context, tensorflow::DataTypeCanUseMemcpy(context->input_type(1)),
                absl::InvalidArgumentError("Only tensors of plain numbers can be sent"));
    OP_REQUIRES(context, static_cast<int>(to_.size()) == context->num_inputs() - 1,
                absl::InvalidArgumentError("There must be a rank for each tensor"));
  }

  void Compute(OpKernelContext* context) override {
    for (size_t i = 0; i < to_.size(); ++i) {
      const Tensor& tensor = context->input(i + 1);
      context->set_output(i, tensor);
      OP_REQUIRES_OK(context, Named(tag_, Transport::Get().Send(to_[i], tag_, tensor)));
    }
  }

 private:
  std::vector<int> to_;
  std::string tag_;
};

class ReceiveKernel : public AsyncOpKernel {
 public:
  explicit ReceiveKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("source", &source_));
    OP_REQUIRES_OK(context, context->GetAttr("tag", &tag_));
    OP_REQUIRES_OK(context, context->GetAttr("shape", &shape_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    tensorflow::CancellationManager* manager = context->cancellation_manager();
    auto token = std::make_shared<CancellationToken>(
        manager ? manager->get_cancellation_token() : 0);
    struct Cancellation {
      std::atomic<bool> asked{false};
      std::atomic<int64_t> number{0};
    };
    auto cancellation = std::make_shared<Cancellation>();
    const int source = source_;
    const std::string tag = tag_;
    if (manager != nullptr && !manager->RegisterCallback(*token, [source, tag, cancellation] {
          cancellation->asked = true;
          Transport::Get().Abandon(source, tag, cancellation->number);
        })) {
      context->SetStatus(absl::CancelledError("The step was cancelled"));
      done();
      return;
    }
    const int64_t number = Transport::Get().Receive(
        source, tag,
        [this, context, manager, token, done](absl::Status status, Tensor tensor) {
          // Not `Deregister`, which waits for the callback that may have brought us here.
          if (manager != nullptr) manager->TryDeregisterCallback(*token);
          if (status.ok() && (tensor.dtype() != context->expected_output_dtype(0) ||
                              !shape_.IsCompatibleWith(tensor.shape()))) {
            status = absl::InvalidArgumentError(
                "rank " + std::to_string(source_) + " was to send " +
                tensorflow::DataTypeString(context->expected_output_dtype(0)) +
                shape_.DebugString() + ". Received: " +
                tensorflow::DataTypeString(tensor.dtype()) + tensor.shape().DebugString());
          }
          if (status.ok()) {
            context->set_output(0, std::move(tensor));
          } else {
            context->SetStatus(Named(tag_, status));
          }
          done();
        });
    // From here on this kernel and its context may be gone.
    cancellation->number = number;
    if (cancellation->asked) Transport::Get().Abandon(source, tag, number);
  }

 private:
  int source_;
  std::string tag_;
  tensorflow::PartialTensorShape shape_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistSend").Device(DEVICE_CPU), SendKernel);
REGISTER_KERNEL_BUILDER(Name("TfdistReceive").Device(DEVICE_CPU), ReceiveKernel);

}  // namespace
}  // namespace tfdist

extern "C" {

void tfdist_add_peer(int rank, int socket) { tfdist::Transport::Get().AddPeer(rank, socket); }

void tfdist_close() { tfdist::Transport::Get().Close(); }

// Returns 1 when all that was sent has left this process, 0 after `seconds`.
int tfdist_flush(double seconds) { return tfdist::Transport::Get().Flush(seconds) ? 1 : 0; }

void tfdist_traffic(int64_t* sent, int64_t* received) {
  auto [out, in] = tfdist::Transport::Get().Traffic();
  *sent = out;
  *received = in;
}
}
