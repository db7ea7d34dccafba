// The operations of the transport as TensorFlow sees them, and what Python calls by ctypes.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "transport.h"

namespace tfdist {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::CancellationToken;
using tensorflow::DEVICE_CPU;

// TensorFlow leaves out operations whose outputs nobody uses, and runs those with constant inputs
// while it optimizes a graph, unless they say that they have an effect. Those that say so run one
// after the other, unless each is an effect on a resource of its own: that is all that the ticket
// is for.
REGISTER_OP("TfdistStep")
    .Input("ticket: resource")
    .Output("step: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("TensorFlow's id of the step that runs this operation.");

// `step` is empty for the step that runs the operation: a function that is called without being
// inlined has an id of its own in TensorFlow, which its caller's must replace.
REGISTER_OP("TfdistSend")
    .Input("ticket: resource")
    .Input("tensors: N * T")
    .Input("step: S * int64")
    .Output("sent: N * T")
    .Attr("N: int >= 1")
    .Attr("S: int >= 0")
    .Attr("T: type")
    .Attr("to: list(int)")
    .Attr("tag: string")
    .Attr("in_graph: bool")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      for (int i = 0; i < context->num_outputs(); ++i) context->set_output(i, context->input(i + 1));
      return absl::OkStatus();
    })
    .Doc("Sends a tensor to each of some ranks, and passes them on.");

REGISTER_OP("TfdistReceive")
    .Input("ticket: resource")
    .Input("after: T")
    .Input("step: S * int64")
    .Output("received: dtype")
    .Attr("T: type")
    .Attr("S: int >= 0")
    .Attr("dtype: type")
    .Attr("shape: shape")
    .Attr("source: int")
    .Attr("tag: string")
    .Attr("in_graph: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ExplicitShape)
    .Doc("Returns the next tensor of this tag from a rank; `after` only says when to begin.");

// TensorFlow makes AddN of a chain of additions, and AddN begins with whichever term it can take
// the memory of: that differs from rank to rank, and with it the last bit of a sum.
REGISTER_OP("TfdistSum")
    .Input("terms: N * T")
    .Output("sum: T")
    .Attr("N: int >= 1")
    .Attr("T: numbertype")
    .Attr("mean: bool")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("The sum or mean of terms of one shape, in their order; 16 bits are rounded to once.");

absl::Status Named(const std::string& tag, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), tag + ": " + std::string(status.message()));
}

// Each eager operation is a step of its own to TensorFlow: there is nothing to tell them apart by.
int64_t StepId(OpKernelContext* context, bool in_graph) {
  tensorflow::OpInputList step;
  if (context->input_list("step", &step).ok() && step.size() > 0) {
    return step[0].scalar<int64_t>()();
  }
  return in_graph ? context->step_id() : 0;
}

class StepKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Tensor* step = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &step));
    step->scalar<int64_t>()() = context->step_id();
  }
};

class SendKernel : public OpKernel {
 public:
  explicit SendKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("to", &to_));
    OP_REQUIRES_OK(context, context->GetAttr("tag", &tag_));
    OP_REQUIRES_OK(context, context->GetAttr("in_graph", &in_graph_));
    OP_REQUIRES(context, tensorflow::DataTypeCanUseMemcpy(context->input_type(1)),
                absl::InvalidArgumentError("Only tensors of plain numbers can be sent"));
    OP_REQUIRES(context, static_cast<int>(to_.size()) == context->num_outputs(),
                absl::InvalidArgumentError("There must be a rank for each tensor"));
  }

  void Compute(OpKernelContext* context) override {
    const Call call{tag_, StepId(context, in_graph_)};
    for (size_t i = 0; i < to_.size(); ++i) {
      const Tensor& tensor = context->input(i + 1);
      context->set_output(i, tensor);
      OP_REQUIRES_OK(context, Named(tag_, Transport::Get().Send(to_[i], call, tensor)));
    }
  }

 private:
  std::vector<int> to_;
  std::string tag_;
  bool in_graph_ = false;
};

class ReceiveKernel : public AsyncOpKernel {
 public:
  explicit ReceiveKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("source", &source_));
    OP_REQUIRES_OK(context, context->GetAttr("tag", &tag_));
    OP_REQUIRES_OK(context, context->GetAttr("in_graph", &in_graph_));
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
        source, {tag, StepId(context, in_graph_)},
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
  bool in_graph_ = false;
  tensorflow::PartialTensorShape shape_;
};

bool IsSlice(const Tensor& tensor) {
  auto* buffer = const_cast<tensorflow::TensorBuffer*>(tensorflow::DMAHelper::buffer(&tensor));
  return buffer != nullptr && buffer->root_buffer() != buffer;
}

template <typename T>
class SumKernel : public OpKernel {
 public:
  explicit SumKernel(OpKernelConstruction* context) : OpKernel(context) {
    bool mean = false;
    OP_REQUIRES_OK(context, context->GetAttr("mean", &mean));
    if (mean) divisor_ = static_cast<Wide>(static_cast<float>(context->num_inputs()));
  }

  void Compute(OpKernelContext* context) override {
    std::vector<const T*> terms;
    std::vector<int> places;
    const TensorShape& shape = context->input(0).shape();
    for (int i = 0; i < context->num_inputs(); ++i) {
      const Tensor& term = context->input(i);
      OP_REQUIRES_OK(context,
                     OneShape("The terms of a sum must have one shape", shape, term.shape()));
      terms.push_back(term.flat<T>().data());
      // The memory of a slice is that of the whole, which would live as long as the sum does.
      if (!IsSlice(term)) places.push_back(i);
    }
    Tensor* sum = nullptr;
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output(places, 0, shape, &sum));
    T* out = sum->flat<T>().data();
    Share(context, shape.num_elements(), static_cast<int64_t>(terms.size()),
          [this, &terms, out](int64_t begin, int64_t end) {
            for (; begin < end; begin += kBlock) {
              Add(terms, begin, std::min(begin + kBlock, end), out);
            }
          });
  }

 private:
  static constexpr int64_t kBlock = 1024;
  static constexpr bool kIsShort =
      std::is_same_v<T, Eigen::half> || std::is_same_v<T, Eigen::bfloat16>;
  using Wide = std::conditional_t<kIsShort, float, T>;

  // By way of memory of its own: `out` may be that of any term.
  void Add(const std::vector<const T*>& terms, int64_t begin, int64_t end, T* out) const {
    Wide total[kBlock];
    const int64_t count = end - begin;
    for (int64_t i = 0; i < count; ++i) total[i] = static_cast<Wide>(terms[0][begin + i]);
    for (size_t term = 1; term < terms.size(); ++term) {
      const T* more = terms[term] + begin;
      for (int64_t i = 0; i < count; ++i) total[i] += static_cast<Wide>(more[i]);
    }
    if (divisor_ != Wide(1)) {
      for (int64_t i = 0; i < count; ++i) total[i] /= divisor_;
    }
    for (int64_t i = 0; i < count; ++i) out[begin + i] = static_cast<T>(total[i]);
  }

  Wide divisor_ = Wide(1);
};

REGISTER_KERNEL_BUILDER(Name("TfdistStep").Device(DEVICE_CPU), StepKernel);
REGISTER_KERNEL_BUILDER(Name("TfdistSend").Device(DEVICE_CPU), SendKernel);
REGISTER_KERNEL_BUILDER(Name("TfdistReceive").Device(DEVICE_CPU), ReceiveKernel);
#define REGISTER_SUM(T) \
  REGISTER_KERNEL_BUILDER(Name("TfdistSum").Device(DEVICE_CPU).TypeConstraint<T>("T"), SumKernel<T>)
TF_CALL_REAL_NUMBER_TYPES(REGISTER_SUM);
TF_CALL_COMPLEX_TYPES(REGISTER_SUM);
#undef REGISTER_SUM

}  // namespace
}  // namespace tfdist

extern "C" {

void tfdist_add_peer(int rank, int socket) { tfdist::Transport::Get().AddPeer(rank, socket); }

void tfdist_begin_run(int64_t run) { tfdist::Transport::Get().BeginRun(run); }

void tfdist_close() { tfdist::Transport::Get().Close(); }

// Returns 1 when all that was sent has left this process, 0 after `seconds`.
int tfdist_flush(double seconds) { return tfdist::Transport::Get().Flush(seconds) ? 1 : 0; }

void tfdist_traffic(int64_t* sent, int64_t* received) {
  const auto traffic = tfdist::Transport::Get().Count();
  *sent = traffic.sent;
  *received = traffic.received;
}
}
