#ifndef TFDIST_NATIVE_CLONES_H_
#define TFDIST_NATIVE_CLONES_H_

// Before a function whose loops are compiled for several kinds of processor; the first call chooses.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TFDIST_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TFDIST_CLONES
#endif

#endif  // TFDIST_NATIVE_CLONES_H_
