/* Reads lines: on a terminal with libedit (arrow keys, history of this run), elsewhere plainly. */
#ifndef KEEPD_CLIENT_LINE_H
#define KEEPD_CLIENT_LINE_H

#include <stdbool.h>

struct line;

enum line_end { LINE_READ, LINE_CLEARED /* Ctrl-C */, LINE_ENDED /* Ctrl-D, end of the input */ };

struct line *line_open(bool terminal);
void line_close(struct line *line);
/* *text is valid until the next call and has no newline. */
enum line_end line_read(struct line *line, const char **text);

#endif
