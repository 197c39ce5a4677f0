/* Operators and access to parts of values. */
#ifndef KEEPD_TEXT_JINJA_OPS_H
#define KEEPD_TEXT_JINJA_OPS_H

#include "text/jinja/ast.h"

int jinja_binary(struct jinja_run *run, enum jinja_op op, const struct jinja_value *a,
                 const struct jinja_value *b, struct jinja_value *out);
/* Decimal digits, perhaps after a minus: INT, or BIG beyond 64 bits. */
int jinja_int_from_digits(struct jinja_run *run, const char *digits, size_t size,
                          struct jinja_value *out);
int jinja_negate(struct jinja_run *run, const struct jinja_value *v, bool minus,
                 struct jinja_value *out);
int jinja_compare(struct jinja_run *run, enum jinja_op op, const struct jinja_value *a,
                  const struct jinja_value *b, bool *out);
int jinja_contains(struct jinja_run *run, const struct jinja_value *container,
                   const struct jinja_value *item, bool *out);

/* object.name: attribute, else item, else undefined. */
int jinja_getattr(struct jinja_run *run, const struct jinja_value *object,
                  const struct jinja_value *name, struct jinja_value *out);
/* object[key]: item, else attribute, else undefined. */
int jinja_getitem(struct jinja_run *run, const struct jinja_value *object,
                  const struct jinja_value *key, struct jinja_value *out);
/* The attribute alone; *out MISSING when there is none. */
int jinja_attribute(struct jinja_run *run, const struct jinja_value *object,
                    const struct jinja_value *name, struct jinja_value *out);
/* object[parts[0]:parts[1]:parts[2]]; parts may be JINJA_MISSING. */
int jinja_slice(struct jinja_run *run, const struct jinja_value *object,
                const struct jinja_value parts[3], struct jinja_value *out);
/* "a.b.0": the path that attribute= arguments name; None or MISSING: the object itself. */
int jinja_path(struct jinja_run *run, const struct jinja_value *object,
               const struct jinja_value *path, struct jinja_value *out);
int jinja_length(struct jinja_run *run, const struct jinja_value *v, int64_t *out);
int jinja_range(struct jinja_run *run, int64_t first, int64_t end, int64_t step,
                struct jinja_value *out);
int jinja_escape(struct jinja_run *run, const struct jinja_value *s, struct jinja_value *out);

#endif
