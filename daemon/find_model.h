/* Finds the files of a model: a path, or the name of a model in the hub, which is fetched if the
 * command may fetch (daemon/hub.h). Thread: as daemon/start.h. */
#ifndef KEEPD_DAEMON_FIND_MODEL_H
#define KEEPD_DAEMON_FIND_MODEL_H

#include <stdbool.h>

#include "daemon/hub.h"
#include "daemon/start.h"

/* Finds the model: a path that is there, or a name of the hub; then the draft model. Writes paths
 * of the hub's models to *start. On failure prints the reason and returns the exit status. */
int find_model(const struct config *config, enum hub_use use, struct start *start);
/* Is the model or its draft model named by its place in the hub? */
bool find_names_hub(const struct config *config);

#endif
