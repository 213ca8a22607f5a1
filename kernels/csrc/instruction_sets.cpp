// Which instruction sets this CPU can run. Compiled for the oldest CPU of the architecture.
#include <cstdint>
#include <string>

#include "glm5_kernels.h"

#if defined(__APPLE__)
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

// True if Linux lets this process use the tile registers of AMX; asks for it.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, asm/fpu/types.h
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// What the CPU has and the system saves: that is what the compiler's runtime checks.
std::string available() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "";
  std::string sets;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512vnni")) {
    const bool bf16 = __builtin_cpu_supports("avx512bf16");
    const bool amx =
        __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16");
    if (bf16 && amx && may_use_tiles()) sets += "amx ";
    if (bf16) sets += "avx512bf16 ";
    sets += "avx512vnni ";
  }
  if (__builtin_cpu_supports("avxvnni")) sets += "avxvnni ";
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

extern "C" const char* glm5_interface() { return GLM5_INTERFACE; }

extern "C" const char* glm5_instruction_sets() {
  static const std::string sets = available();
  return sets.c_str();
}
