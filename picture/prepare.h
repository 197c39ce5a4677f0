/* Declarations for prepare.c and its tests alone. */
#ifndef KEEPD_PICTURE_PREPARE_H
#define KEEPD_PICTURE_PREPARE_H

#include <stdatomic.h>

#include "picture/picture.h"

/* Sides of a picture whose shape decides on the tile: the longer one by the shorter one, at most.
 */
#define PICTURE_RATIO_MAX 200

extern atomic_int_fast64_t prepared_bytes; /* the tiles of all pictures that are there */

#endif
