/* The eviction trace of a request (kv.report "trace") records what each eviction of choice 0
 * removed, and when. Each eviction has its own record, allocated before the eviction and cut to
 * size after it; together the records hold at most one number per entry the sequence ever had.
 * Without memory the eviction still happens and is counted as lost. Engine thread; the job's reader
 * frees the trace with the job. */
#ifndef KEEPD_ENGINE_STEPS_TRACE_H
#define KEEPD_ENGINE_STEPS_TRACE_H

#include "engine/steps/seq.h"

/* Prepares to record the sequence's next eviction; NULL: not wanted, or no memory. */
struct kern_trace *trace_begin(struct sequence *seq, const struct reserve_shape *shape);
/* Adds the record that was begun, after its eviction. */
void trace_end(struct sequence *seq);
/* Frees a record that was begun for an eviction that did not happen. */
void trace_drop(struct sequence *seq);
/* Frees a job's whole trace. */
void trace_close(struct engine_kv_details *details);

#endif
