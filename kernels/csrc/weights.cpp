// The exported ops of the quantizer, for one instruction set.
#include "gptq.h"
#include "hadamard.h"
#include "weight_rounding.h"

using namespace glm5::GLM5_SET;

GLM5_EXPORT(hadamard, Hadamard)
GLM5_EXPORT(ssz_scale, SszScale)
GLM5_EXPORT(fake_round, FakeRound)
GLM5_EXPORT(round_rows, RoundRows)
GLM5_EXPORT(gptq_round, GptqRound)
