/* Everything in one unit, so that the compiler sees through all of it. */
#include "decoder.h"
#include "exports.h"
#include "packed.h"
