/* Progress while the model is fetched, loads, or is rounded for a file: on a terminal one line that
 * is drawn again, with bytes, rate and the time that is left; elsewhere one log line at the
 * beginning and one at the end. The service manager is notified every second.
 *
 * Thread: the one that opens the engine. */
#ifndef KEEPD_DAEMON_PROGRESS_H
#define KEEPD_DAEMON_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum progress_work { PROGRESS_LOADING, PROGRESS_ROUNDING, PROGRESS_FETCHING };

struct progress {
    enum progress_work work;
    bool terminal;       /* stderr is one */
    bool begun;          /* something was reported */
    uint64_t done;       /* bytes of the last report */
    uint64_t before;     /* bytes of earlier loads: each replica on a device loads for itself */
    int64_t began_ns;    /* beginning of this load */
    int64_t opened_ns;   /* beginning of all loads */
    int64_t shown_ns;    /* when the line was last drawn */
    int64_t notified_ns; /* when the service manager was last notified */
};

void progress_open(struct progress *progress, enum progress_work work, bool terminal);
/* Notes that `done` of `total` bytes are done; 0 of 0 if the total is unknown. */
void progress_note(struct progress *progress, uint64_t done, uint64_t total, const char *what);
/* Ends the line. `whole`: the work succeeded, so its duration is logged. */
void progress_close(struct progress *progress, bool whole);

#define PROGRESS_LINE 80
/* Writes the line of a terminal, at most 79 columns: a bar, the bytes, and after half a second the
 * mean rate and the time left at this rate. */
void progress_line(char out[PROGRESS_LINE], uint64_t done, uint64_t total, int64_t elapsed_ns,
                   const char *what);

#endif
