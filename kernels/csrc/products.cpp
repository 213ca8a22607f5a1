// The exported ops around linear layers and experts, for one instruction set.
#include "experts.h"
#include "head_products.h"
#include "int8_linear.h"
#include "mhc.h"
#include "rms_norm.h"

using namespace glm5::GLM5_SET;

GLM5_EXPORT(rms_norm, RmsNorm)
GLM5_EXPORT(mhc, Mhc)
GLM5_EXPORT(int8_linear, Int8Linear)
GLM5_EXPORT(w4a8_moe, W4a8Moe)
GLM5_EXPORT(head_products, HeadProducts)
GLM5_EXPORT(head_products_by_rows, HeadProducts)
