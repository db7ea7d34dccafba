// Tensors from the memory of another process on this host: one copy, where a socket takes two.
//
// As in the CMA transports of MPI libraries: process_vm_readv(2), where the kernel lets it.

#ifndef TFDIST_NATIVE_NEAR_MEMORY_H_
#define TFDIST_NATIVE_NEAR_MEMORY_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace tfdist {

// The process at the other end of a connected socket; 0 where it is none of this host's.
pid_t ProcessBehind(int socket);

// Lets the other processes of this user read this one's memory, also where Yama
// (kernel.yama.ptrace_scope = 1) keeps that to its parents. False where the environment forbids it,
// by TFDIST_NEAR_MEMORY=0.
bool AllowReads();

// A word of this process that others read to see whether they can, and what it holds.
const uint64_t* ProbeWord();

// Copies from the memory of another process; false where it is gone, or the kernel does not let it.
bool ReadMemory(pid_t process, uint64_t address, void* target, size_t bytes);

}  // namespace tfdist

#endif  // TFDIST_NATIVE_NEAR_MEMORY_H_
