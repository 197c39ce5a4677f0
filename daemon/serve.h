/* The daemon: opens the server and the engine of a single model (the server opens those of
 * several), runs until a signal, and closes them. Every request ends in server_run, before an
 * engine is closed under it. --check-config, --inspect and --quantize-to end before serving.
 * Thread: the first one, which becomes the event loop's. */
#ifndef KEEPD_DAEMON_SERVE_H
#define KEEPD_DAEMON_SERVE_H

#include "config/config.h"

/* Returns the exit status. *config was loaded from the arguments, from which a reload reads it
 * again. */
int serve_run(struct config *config, int argc, char **argv);

#endif
