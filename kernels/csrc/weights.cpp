// The exported ops of the quantizer, for one instruction set.
#include "parallel.h"

using namespace glm5::GLM5_SET;
