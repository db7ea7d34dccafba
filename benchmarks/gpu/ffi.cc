// A handler of XLA's foreign function interface that sums by NCCL on XLA's stream; on CPUs it copies.
//
// NCCL and CUDA are opened by their names when they are first needed, so that this is compiled without them.
#include <dlfcn.h>

#include <cstring>

#include "xla/ffi/api/ffi.h"

extern "C" const XLA_FFI_Api* XLA_FFI_GetApi();

namespace {

namespace ffi = xla::ffi;

struct UniqueId {
  char bytes[128];
};

void* communicator = nullptr;

void* Nccl() {
  static void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
  return library;
}

template <typename Function>
Function Symbol(const char* name) {
  return Nccl() == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(Nccl(), name));
}

ffi::Error SumOnHost(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  std::memcpy(y->typed_data(), x.typed_data(), x.element_count() * sizeof(float));
  return ffi::Error::Success();
}

ffi::Error SumOnDevice(void* stream, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  using AllReduce = int (*)(const void*, void*, size_t, int, int, void*, void*);
  static const auto all_reduce = Symbol<AllReduce>("ncclAllReduce");
  constexpr int kFloat32 = 7, kSum = 0;
  if (all_reduce == nullptr || communicator == nullptr) {
    return ffi::Error::Internal("NCCL is not there, or this rank has not joined.");
  }
  const int code = all_reduce(x.typed_data(), y->typed_data(), x.element_count(), kFloat32, kSum,
                              communicator, stream);
  return code == 0 ? ffi::Error::Success() : ffi::Error::Internal("ncclAllReduce failed.");
}

XLA_FFI_DEFINE_HANDLER(kSumOnHost, SumOnHost,
                       ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER(kSumOnDevice, SumOnDevice,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_REGISTER_HANDLER(XLA_FFI_GetApi(), "tfdist_probe_sum", "Host", kSumOnHost);
XLA_FFI_REGISTER_HANDLER(XLA_FFI_GetApi(), "tfdist_probe_sum", "CUDA", kSumOnDevice);

}  // namespace

extern "C" int tfdist_probe_id(char* bytes) {
  const auto make = Symbol<int (*)(UniqueId*)>("ncclGetUniqueId");
  return make == nullptr ? -1 : make(reinterpret_cast<UniqueId*>(bytes));
}

extern "C" int tfdist_probe_join(const char* bytes, int rank, int size) {
  const auto join = Symbol<int (*)(void**, int, UniqueId, int)>("ncclCommInitRank");
  UniqueId id;
  std::memcpy(id.bytes, bytes, sizeof(id.bytes));
  return join == nullptr ? -1 : join(&communicator, size, id, rank);
}
