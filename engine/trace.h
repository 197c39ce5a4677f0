/* The eviction trace of a request (kv.report "trace"): what was evicted when, for its choice 0.
 *
 * Each eviction is recorded in memory of its own, taken before and cut to size after; together they
 * hold at most one number per entry the sequence ever had. Without memory the eviction happens all
 * the same and is counted as lost. Engine thread; the job's reader frees with the job. */
#ifndef KEEPD_ENGINE_TRACE_H
#define KEEPD_ENGINE_TRACE_H

#include "engine/seq.h"

/* Prepares to record the sequence's next eviction, `streams` streams; NULL: not wanted, or lost. */
struct kern_trace *trace_begin(struct sequence *seq, int64_t streams);
/* The eviction that was begun has happened. */
void trace_end(struct sequence *seq);
/* Frees what was begun and never happened. */
void trace_drop(struct sequence *seq);
/* Frees a job's whole trace. */
void trace_close(struct engine_kv_details *details);

#endif
