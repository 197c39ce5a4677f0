/* The models that a server serves. Each has an engine of its own, the rules of its requests, and
 * the counts of those that have ended.
 *
 * Thread: the loop. Workers read `rules` and `engine` of an exchange's model, which do not change
 * while the exchange exists. */
#ifndef KEEPD_SERVER_MODELS_H
#define KEEPD_SERVER_MODELS_H

#include "server/oai/oai.h"
#include "server/server.h"
#include "server/stats.h"
#include "server/watchdog.h"

struct served_model {
    struct server_model options;
    char *names; /* storage of rules.names */
    struct engine *engine;
    struct oai_rules rules;
    struct stats stats;
    struct watchdog watchdog;
};

/* Reads the model's names. ERR_INVALID, ERR_LIMIT. */
int served_open(struct served_model *model, const struct server_model *options,
                struct fault *fault);
/* Takes the engine, from which the rules of requests follow. */
int served_use(struct served_model *model, const struct server_options *server,
               struct engine *engine, struct fault *fault);
void served_close(struct served_model *model);

#endif
