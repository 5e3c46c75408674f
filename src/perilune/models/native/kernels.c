/* One compilation unit, so that the compiler can inline across all files. */
#include "decoder.h"
#include "exports.h"
#include "delta.h"
#include "packed.h"
