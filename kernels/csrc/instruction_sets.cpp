// Which instruction sets this CPU can run. Compiled for the oldest CPU of the architecture.
#include <cstdint>
#include <string>

#include "glm5_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__x86_64__)

bool bit(unsigned value, int number) { return value >> number & 1; }

// True if Linux lets this process use the tile registers of AMX; asks for it.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, asm/fpu/types.h
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

std::string available() {
  unsigned a, b, c, d, b7, c7, d7, a71 = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27) /* xgetbv */ || !__get_cpuid_count(7, 0, &a, &b7, &c7, &d7))
    return "";
  const bool fma = bit(c, 12);
  unsigned state, high;
  __asm__("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
  if ((state & 0x6) != 0x6 || !bit(b7, 5) || !fma) return "";
  __get_cpuid_count(7, 1, &a71, &b, &c, &d);
  std::string sets;
  const bool avx512 =
      (state & 0xe6) == 0xe6 && bit(b7, 16) && bit(b7, 17) && bit(b7, 30) && bit(b7, 31);  // f, dq, bw, vl
  if (avx512 && bit(c7, 11)) {                                                             // vnni
    const bool bf16 = bit(a71, 5);
    const bool amx = bf16 && bit(d7, 22) && bit(d7, 24) && bit(d7, 25);  // amx-bf16, amx-tile, amx-int8
    if (amx && may_use_tiles()) sets += "amx ";
    if (bf16) sets += "avx512bf16 ";
    sets += "avx512vnni ";
  }
  if (bit(a71, 4)) sets += "avxvnni ";
  return sets + "avx2";
}

#elif defined(__APPLE__)

bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value;
}

std::string available() {
  if (!has("hw.optional.arm.FEAT_DotProd")) return "";
  return has("hw.optional.arm.FEAT_I8MM") ? "i8mm dotprod" : "dotprod";
}

#else

std::string available() {
  constexpr unsigned long kDotProduct = 1UL << 20, kInt8Matrices = 1UL << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM
  if (!(getauxval(AT_HWCAP) & kDotProduct)) return "";
  return getauxval(AT_HWCAP2) & kInt8Matrices ? "i8mm dotprod" : "dotprod";
}

#endif
}  // namespace

extern "C" const char* glm5_instruction_sets() {
  static const std::string sets = available();
  return sets.c_str();
}
