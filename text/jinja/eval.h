/* The evaluator: renders a template by walking its syntax tree. Expressions, statements and calls
 * are in eval.c, loops in loop.c. */
#ifndef KEEPD_TEXT_JINJA_EVAL_H
#define KEEPD_TEXT_JINJA_EVAL_H

#include "text/jinja/ast.h"
#include "text/jinja/text.h"

/* Renders the whole template into run->out. The caller has set all members of *run but `scope`. */
int jinja_execute(struct jinja_run *run);

/* Results of a statement besides errors. */
enum { JINJA_FLOW_BREAK = 1, JINJA_FLOW_CONTINUE = 2 };

int jinja_eval(struct jinja_run *run, const struct jinja_node *node, struct jinja_value *out);
int jinja_exec(struct jinja_run *run, const struct jinja_node *node);
int jinja_exec_scoped(struct jinja_run *run, const struct jinja_node *body); /* in a new scope */

struct jinja_variable {
    const struct jinja_name *name;
    struct jinja_value value;
};

/* Variables set inside a loop, macro, call, with, filter or block. The outermost scope has no
 * variables of its own: they are run->globals. */
struct jinja_scope {
    struct jinja_scope *outer; /* where the block was written, not where it was called */
    struct jinja_variable *items;
    uint32_t count, capacity;
};

int jinja_open_scope(struct jinja_run *run, struct jinja_scope *outer, struct jinja_scope **out);
int jinja_set_variable(struct jinja_run *run, struct jinja_scope *scope,
                       const struct jinja_name *name, const struct jinja_value *value);
/* `target`: a name, a tuple of targets, or ns.name. */
int jinja_assign(struct jinja_run *run, struct jinja_scope *scope, const struct jinja_node *target,
                 const struct jinja_value *value);

struct jinja_loop;
int jinja_exec_for(struct jinja_run *run, const struct jinja_node *node);
/* Calls loop(items) inside a recursive loop. */
int jinja_call_loop(struct jinja_run *run, struct jinja_loop *loop, const struct jinja_args *args,
                    struct jinja_value *out);
int jinja_loop_attribute(struct jinja_run *run, struct jinja_loop *loop,
                         const struct jinja_value *name, struct jinja_value *out);
int jinja_loop_length(struct jinja_run *run, struct jinja_loop *loop, int64_t *out);

#endif
