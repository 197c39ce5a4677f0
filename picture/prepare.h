/* Declarations for prepare.c and its tests alone. */
#ifndef KEEPD_PICTURE_PREPARE_H
#define KEEPD_PICTURE_PREPARE_H

#include <stdatomic.h>

#include "picture/picture.h"

#define PICTURE_RATIO_MAX 200 /* ratio of a picture's sides, where its shape decides on the tile   \
                               */

extern atomic_int_fast64_t prepared_bytes; /* the tiles of all pictures that are there */

#endif
