#ifndef TFDIST_NATIVE_EXPONENTIAL_H_
#define TFDIST_NATIVE_EXPONENTIAL_H_

#include <cstdint>
#include <cstring>

namespace tfdist {

// exp(t) for t in [-87, 87], beyond which it stays what it is there: 2^n exp(r), n the whole number
// next to t / ln 2, exp(r) by Taylor. Without a branch or a call, so that loops of it are vectors.
inline __attribute__((always_inline)) float Exponential(float t) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole.
  t = t < -87.0f ? -87.0f : t;
  t = t > 87.0f ? 87.0f : t;
  const float shifted = t * 1.44269504f + kShift;
  const float n = shifted - kShift;
  // ln 2 in two parts, the first of which is exact in few bits.
  const float r = (t - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  const int32_t power = (bits - 0x4B400000 + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof(scale));
  return p * scale;
}

// The same, but exactly 0 below -87: what is masked has no weight.
inline __attribute__((always_inline)) float Weight(float t) {
  const float found = Exponential(t);
  return t < -87.0f ? 0.0f : found;
}

}  // namespace tfdist

#endif  // TFDIST_NATIVE_EXPONENTIAL_H_
