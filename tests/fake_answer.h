/* Answers of the fake engine (tests/fake_engine.c): a job's outputs and the tokens that fill them.
 */
#ifndef KEEPD_TESTS_FAKE_ANSWER_H
#define KEEPD_TESTS_FAKE_ANSWER_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/engine_job.h"

enum { FAKE_LAYERS = 2, FAKE_HEADS = 2, FAKE_WIDTH = 8 };

/* The answers that a prompt asks for. `thinks`, `channels` and `script` are set before
 * fake_answer_open. */
struct fake_answer {
    char *reply; /* text of each choice, of reply_size bytes; owned */
    size_t reply_size;
    int32_t fail_at; /* tokens; -1 never */
    bool kill, thinks, channels, stamps, scripted;
    const cJSON *script; /* NULL: no script; borrowed */
};

/* Reads the pairs of text and answer that KEEPD_FAKE_SCRIPT names; NULL without one. The caller
 * frees the tree with json_free. */
cJSON *fake_script_open(void);

/* Returns a number that looks random. */
uint32_t fake_mix(uint64_t x);
int fake_choices(const struct engine_request *request);
bool fake_answer_open(struct fake_answer *answer, const struct engine_request *request);
void fake_answer_close(struct fake_answer *answer);

/* Allocates a job's outputs and scores its prompt; engine_job_close frees them. false: no memory.
 */
bool fake_outputs_open(struct engine_job *job);

/* Adds a token to choice `index`. Returns how the choice ended, or ENGINE_RUNNING. */
enum engine_finish fake_answer_append(const struct fake_answer *answer, struct engine *engine,
                                      struct engine_job *job, int index);

#endif
