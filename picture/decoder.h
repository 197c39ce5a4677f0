/* Decoding in a process of its own, because the bytes are a stranger's and the libraries are large.
 *
 * Each picture has its own process: the program starts itself again with PICTURE_DECODER as its
 * only argument, with an empty environment and one end of a socket pair as its only file. Before it
 * reads a byte of the picture it gives up its rights (sandbox.h). What goes wrong in it, a crash
 * too, is the error of that picture, and nothing of one picture is there when the next is decoded.
 *
 * The caller's thread waits, until the deadline at most; there are as many processes as threads
 * that call. Any thread. */
#ifndef KEEPD_PICTURE_DECODER_H
#define KEEPD_PICTURE_DECODER_H

#include "picture/picture.h"

#define PICTURE_DECODER    "picture-decoder" /* argument of the program */
#define PICTURES_DECODE_MS 20000             /* for all pictures of a request together */

/* As picture_decode. Also ERR_LIMIT: the deadline (a time of clock_ns) has passed; ERR_IO: no
 * process could be started, or this system refuses to take its rights away. */
int picture_read(const void *data, size_t size, int64_t deadline, struct picture_rgb *out,
                 struct fault *fault);

/* The process: decodes one picture from file 0 and answers there. Returns the exit status. */
int picture_decoder_main(void);

#endif
