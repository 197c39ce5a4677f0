/* References inside a schema document, and whether branches of oneOf exclude each other. */
#ifndef KEEPD_CONSTRAIN_SCHEMA_REFS_H
#define KEEPD_CONSTRAIN_SCHEMA_REFS_H

#include "constrain/schema_int.h"

/* Finds the schema to which `ref`, the $ref of the schema `at`, refers: a JSON pointer
 * ("#/$defs/x"), an anchor
 * ("#x"), or the $id of a schema in the document. NULL: refused, see schema_refuse. */
const cJSON *schema_resolve(struct schema *s, const cJSON *at, const cJSON *ref);

/* Can no instance satisfy both schemas? Returns true only where that is certain: their types
 * differ, their const or enum have no value in common, or they are objects that require the same
 * property with two schemas of which this is true. */
bool schema_are_apart(struct schema *s, const cJSON *a, const cJSON *b);

/* Does `b` reject every object of `a` that has the member? True only where that is certain: both
 * declare it with schemas that are apart, or `b` forbids members that it does not declare. */
bool schema_member_decides(struct schema *s, const cJSON *a, const cJSON *b, const char *name);
/* Returns a member of `a` of which that is true, one whose const or enum is given (`given`) or one
 * that `a` requires; NULL: none. */
const char *schema_deciding_member(struct schema *s, const cJSON *a, const cJSON *b, bool given);
/* Is `name`, from the discriminator of the schema `at`, a reference to the same schema as the
 * branch, or the last part of the branch's reference? */
bool schema_is_branch(struct schema *s, const cJSON *at, const cJSON *branch, const char *name);

#endif
