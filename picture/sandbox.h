/* Takes away the rights of a process that decodes: declarations for decoder.c. */
#ifndef KEEPD_PICTURE_SANDBOX_H
#define KEEPD_PICTURE_SANDBOX_H

#include <stdbool.h>

/* From now on the calling process, which has one thread and uses file 0 alone, may read and write
 * that file, ask for memory and end; no file can be opened, and any other call to the kernel ends
 * it. Its memory and its time are bounded. -1: the system refuses, and the process must not go on.
 */
int sandbox_enter(void);

/* Whether calls are refused: a sanitizer makes calls of its own, so programs with one do not refuse
 * them. */
bool sandbox_filters(void);

#endif
