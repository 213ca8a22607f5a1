// The exported sublayers, for one instruction set.
#include "sublayers.h"

using namespace glm5::GLM5_SET;

GLM5_EXPORT(mla_sublayer, MlaSublayer)
GLM5_EXPORT(mlp_sublayer, MlpSublayer)
