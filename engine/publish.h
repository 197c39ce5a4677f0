/* How the engine's thread hands results to readers, the other half of engine_see_choice and
 * engine_see_job. Everything a store announces is written before it, so a reader that sees the
 * store sees the rest: a token's contents before its count, all tokens before `finish`, all choices
 * before `finished`. tests/unit/engine/test_publish.c checks both halves against each other in
 * every order that the memory model allows. */
#ifndef KEEPD_ENGINE_PUBLISH_H
#define KEEPD_ENGINE_PUBLISH_H

#include "engine/engine.h"

/* tokens[count - 1] and its text are written; of the text `safe` bytes may be shown. */
static inline void publish_token(struct engine_choice *choice, uint32_t count, size_t safe) {
    atomic_store_explicit(&choice->text_safe, safe, memory_order_release);
    atomic_store_explicit(&choice->token_count, count, memory_order_release);
}

static inline void publish_choice_end(struct engine_choice *choice) {
    atomic_store_explicit(&choice->finish, (int)choice->ending, memory_order_release);
}

/* After the ends of its choices. The job is the submitter's from here on. */
static inline void publish_job_end(struct engine_job *job) {
    atomic_store_explicit(&job->finished, 1, memory_order_release);
}

#endif
