// The exported ops of attention, for one instruction set.
#include "parallel.h"

using namespace glm5::GLM5_SET;
