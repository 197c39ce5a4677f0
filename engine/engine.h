/* The engine serves one model on one or several replicas; each replica has its own backend and
 * thread. This header and engine_*.h are everything that the server may know about the engine:
 * options and facts, text, requests, jobs, conversations, pictures, statistics, fitting of gates.
 *
 * Life: engine_open (loads, blocking, reports progress) -> engine_start -> submit jobs ->
 * engine_drain -> engine_close. engine_submit and the queue functions belong to one thread, the
 * loop. tests/fake_engine.c implements this header without a model.
 *
 * Replicas. Each replica has its own queue. A job goes to the replica whose conversation saves it
 * most tokens; if no replica has such a conversation, to the least loaded. A replica whose queue is
 * full receives no jobs: the job then starts on another replica, without a conversation if
 * necessary, and is refused only when every queue is full. From the same starting state every
 * replica gives the same answer. */
#ifndef KEEPD_ENGINE_ENGINE_H
#define KEEPD_ENGINE_ENGINE_H

#include "base/buf.h"
#include "engine/engine_job.h"
#include "engine/engine_options.h"

struct engine;

/* Loads the model and opens the replicas. On failure fault->field is the option's name without its
 * dashes ("kv-policy") or, for a fault of the model, the name of a file, field or tensor. */
int engine_open(const struct engine_options *options, struct engine **out, struct fault *fault);
/* Returns the bytes that are free where a model with these options (device, replicas, ranks) would
 * be held: on its devices together, or in the host's memory. */
int64_t engine_unused_memory(const struct engine_options *options);
int engine_start(struct engine *engine);
void engine_drain(struct engine *engine); /* finishes accepted jobs only; returns at once */
bool engine_idle(struct engine *engine);  /* no job is queued or running */
void engine_close(struct engine *engine); /* aborts the remaining jobs (ABORT), joins, frees */

/* The key of spaces that engines with this state_dir (NULL or "" = none) have in common: that of
 * the directory, which is made if it is not there, or a random one. */
int engine_space_key(const char *state_dir, uint8_t key[16], struct fault *fault);

/* Describes a model for people, one line for each fact that can be read, and reports the fault that
 * engine_open would report. *tool_template: the template of chats with tools, freed by the caller;
 * NULL where there is none. On failure returns engine_open's code, and the last line of `out`
 * states the fault. Loads no weights. */
int engine_inspect(const struct engine_options *options, struct buf *out, char **tool_template,
                   struct fault *fault);

/* Saves the model with its matrices rounded as `quantization` says (model/save.h), after the checks
 * of engine_open on a CPU. *bytes: of the weights that were written. */
int engine_save(const struct engine_options *options, const char *to, size_t *bytes,
                struct fault *fault);

/* ---- Adapters (any thread) ---- */

#define ENGINE_ADAPTER_NAME 129 /* bytes, with the NUL */

/* A LoRA adapter that a request uses, from engine_adapter_take to engine_adapter_leave, which comes
 * after the request's last job is finished. `digest` is that of its numbers: part of the space of
 * its conversations, so that none is continued with another adapter, or without it. */
struct engine_adapter {
    int32_t number; /* 0: none */
    uint8_t digest[32];
};

struct engine_adapter_row {
    char name[ENGINE_ADAPTER_NAME];
    uint8_t digest[32];
    int rank;
    int64_t bytes; /* on each replica */
    int users;     /* requests that use it now */
    uint64_t requests;
};

/* Finds an adapter by its name; false: there is none. `out` NULL: it is not taken. */
bool engine_adapter_take(struct engine *engine, const char *name, struct engine_adapter *out);
void engine_adapter_leave(struct engine *engine, int32_t number);
/* Loads an adapter from a file or directory in options.adapter_dir, by its path in it or a whole
 * one, and waits until all replicas have it: seconds. A replica makes no step while it copies the
 * numbers to its backend. The fault names files by their paths in the folder. ERR_UNSUPPORTED:
 * there is no such folder; ERR_NOTFOUND of "lora_path": the folder has no such path; ERR_INVALID:
 * the name is taken; ERR_LIMIT; ERR_STOPPED; the faults of adapter_read. */
int engine_adapter_load(struct engine *engine, const char *name, const char *path,
                        struct fault *fault);
/* No request finds it from here on; its memory is free when the last one that has it has ended.
 * ERR_NOTFOUND. */
int engine_adapter_unload(struct engine *engine, const char *name);
/* Returns the number of rows written. */
int engine_adapters(struct engine *engine, struct engine_adapter_row *rows, int max);
#define ENGINE_ADAPTERS_MAX 64

/* Names of the eviction policies that this model can be served with on this backend; NULL past the
 * end. */
const char *engine_policy_at(const struct engine *engine, int index);

/* ---- Jobs ---- */

/* Takes places in the bounded queues, one for each job of a request, before any work is done for
 * it: all or none, false = full (503). The engine gives a place back when its job is admitted or
 * ends; the caller gives back the places of jobs that are never submitted with engine_queue_leave.
 * Loop thread. */
bool engine_queue_enter(struct engine *engine, int jobs);
void engine_queue_leave(struct engine *engine, int jobs);

/* The most tokens of a prompt and its answer together, with this kv object: the model's positions,
 * or ENGINE_SHIFTED_TOKENS where the sequence is shifted. An answer alone has at most
 * max_model_len. Any thread. */
int engine_longest(const struct engine *engine, const struct engine_kv *kv);

/* Checks the job's request (any thread): token ids in range, lengths against max_model_len
 * (ERR_CONTEXT), kv parameters, pool size (ERR_LIMIT), ERR_NOMEM. fault->field names the OpenAI
 * request field. Resolves the request's kv parameters, which the job then carries: the request must
 * not change any more. */
int engine_check(const struct engine *engine, struct engine_job *job, struct fault *fault);

/* Takes the job, which was checked and whose queue place was entered before. The engine allocates
 * the output arrays here. Any error leaves the job with the caller and the place entered. Loop
 * thread. */
int engine_submit(struct engine *engine, struct engine_job *job);

#endif
