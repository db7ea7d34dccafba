// Updates of optimizers in one pass over memory: of variables, and of a part of a parameter, which has
// no variable of its own.

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "unsupported/Eigen/CXX11/Tensor"

namespace tfdist {
namespace {

using tensorflow::Var;

// `decay_1` and `decay_2` are 1 - beta_1 and 1 - beta_2 as Keras has them: taken in float32, the second
// of these differences would be off by 1e-5 of itself, and with it every update.
REGISTER_OP("TfdistAdam")
    .Input("part: T")
    .Input("m: resource")
    .Input("v: resource")
    .Input("gradient: T")
    .Input("rate: T")
    .Input("decay_1: T")
    .Input("decay_2: T")
    .Input("epsilon: T")
    .Output("updated: T")
    .Attr("T: {float, double}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("A step of Adam (Kingma and Ba 2015), with a rate that bears its corrections of bias.");

REGISTER_OP("TfdistAdamVariable")
    .Input("variable: resource")
    .Input("m: resource")
    .Input("v: resource")
    .Input("gradient: T")
    .Input("rate: T")
    .Input("decay_1: T")
    .Input("decay_2: T")
    .Input("epsilon: T")
    .Attr("T: {float, double}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("TfdistAdam, of a variable.");

// The memory of a variable, for us alone: who has read it before keeps what it read.
template <typename T>
absl::Status Own(OpKernelContext* context, Var* variable, const Tensor& like, T** data) {
  Tensor* tensor = variable->tensor();
  TF_RETURN_IF_ERROR(
      OneShape("A variable, its moments and its gradient have one shape", tensor->shape(), like.shape()));
  if (tensor->dtype() != like.dtype()) {
    return absl::InvalidArgumentError("A variable, its moments and its gradient have one type. Received: " +
                                      tensorflow::DataTypeString(tensor->dtype()) + " and " +
                                      tensorflow::DataTypeString(like.dtype()));
  }
  if (!tensor->RefCountIsOne()) {
    Tensor copy;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
    std::memcpy(copy.flat<T>().data(), tensor->flat<T>().data(), tensor->tensor_data().size());
    *tensor = copy;
  }
  *data = tensor->flat<T>().data();
  return absl::OkStatus();
}

template <typename T>
T Scalar(OpKernelContext* context, int place) {
  return context->input(place).scalar<T>()();
}

// What is `old` at first becomes `updated`; both may be the same memory.
template <typename T>
void Step(OpKernelContext* context, const T* old, T* updated, T* m, T* v) {
  const Tensor& gradient = context->input(3);
  const T rate = Scalar<T>(context, 4), decay_1 = Scalar<T>(context, 5);
  const T decay_2 = Scalar<T>(context, 6), epsilon = Scalar<T>(context, 7);
  const T* g = gradient.flat<T>().data();
  Share(context, gradient.NumElements(), 20, [=](int64_t begin, int64_t end) {
    using Array = Eigen::Array<T, Eigen::Dynamic, 1>;
    const int64_t count = end - begin;
    Eigen::Map<Array> first(m + begin, count), second(v + begin, count);
    Eigen::Map<const Array> slope(g + begin, count), before(old + begin, count);
    first += (slope - first) * decay_1;
    second += (slope.square() - second) * decay_2;
    Eigen::Map<Array>(updated + begin, count) = before - first * rate / (second.sqrt() + epsilon);
  });
}

template <typename T>
class AdamKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& part = context->input(0);
    OP_REQUIRES_OK(context, OneShape("A part and its gradient have one shape", part.shape(),
                                     context->input(3).shape()));
    tensorflow::core::RefCountPtr<Var> m, v;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 1), &m));
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 2), &v));
    OP_REQUIRES(context, m.get() != v.get(),
                absl::InvalidArgumentError("The moments are two variables"));
    tensorflow::mutex_lock lock_m(*m->mu());
    tensorflow::mutex_lock lock_v(*v->mu());
    T* m_data = nullptr;
    T* v_data = nullptr;
    OP_REQUIRES_OK(context, Own(context, m.get(), part, &m_data));
    OP_REQUIRES_OK(context, Own(context, v.get(), part, &v_data));
    Tensor* updated = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, part.shape(), &updated));
    Step<T>(context, part.flat<T>().data(), updated->flat<T>().data(), m_data, v_data);
  }
};

template <typename T>
class AdamVariableKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& gradient = context->input(3);
    tensorflow::core::RefCountPtr<Var> variable, m, v;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 0), &variable));
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 1), &m));
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 2), &v));
    OP_REQUIRES(context, m.get() != v.get() && m.get() != variable.get() && v.get() != variable.get(),
                absl::InvalidArgumentError("The variable and its moments are three variables"));
    tensorflow::mutex_lock lock(*variable->mu());
    tensorflow::mutex_lock lock_m(*m->mu());
    tensorflow::mutex_lock lock_v(*v->mu());
    T* data = nullptr;
    T* m_data = nullptr;
    T* v_data = nullptr;
    OP_REQUIRES_OK(context, Own(context, variable.get(), gradient, &data));
    OP_REQUIRES_OK(context, Own(context, m.get(), gradient, &m_data));
    OP_REQUIRES_OK(context, Own(context, v.get(), gradient, &v_data));
    Step<T>(context, data, data, m_data, v_data);
  }
};

#define REGISTER_ADAM(T)                                                                      \
  REGISTER_KERNEL_BUILDER(                                                                    \
      Name("TfdistAdam").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), AdamKernel<T>); \
  REGISTER_KERNEL_BUILDER(                                                                    \
      Name("TfdistAdamVariable").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),       \
      AdamVariableKernel<T>)
REGISTER_ADAM(float);
REGISTER_ADAM(double);
#undef REGISTER_ADAM

}  // namespace
}  // namespace tfdist
