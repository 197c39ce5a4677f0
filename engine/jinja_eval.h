/* Evaluator: walks a template's tree. */
#ifndef KEEPD_ENGINE_JINJA_EVAL_H
#define KEEPD_ENGINE_JINJA_EVAL_H

#include "engine/jinja_ast.h"
#include "engine/jinja_text.h"

/* Renders the whole template into run->out. `run` is complete but for scope. */
int jinja_execute(struct jinja_run *run);

struct jinja_loop;
int jinja_loop_attribute(struct jinja_run *run, struct jinja_loop *loop,
                         const struct jinja_value *name, struct jinja_value *out);
int jinja_loop_length(struct jinja_run *run, struct jinja_loop *loop, int64_t *out);

#endif
