/* References inside a schema document, and whether branches of oneOf exclude each other. */
#ifndef KEEPD_CONSTRAIN_SCHEMA_REFS_H
#define KEEPD_CONSTRAIN_SCHEMA_REFS_H

#include "constrain/schema_int.h"

/* Finds the schema to which `ref`, the $ref of the schema `at`, refers: a JSON pointer
 * ("#/$defs/x"), an anchor
 * ("#x"), or the $id of a schema in the document. NULL: refused, see schema_refuse. */
const cJSON *schema_resolve(struct schema *s, const cJSON *at, const cJSON *ref);

/* Returns whether no instance can satisfy both schemas. True only where that is certain: their
 * types differ, their const or enum have no value in common, or they are objects that require the
 * same property with two schemas for which this is true. */
bool schema_are_apart(struct schema *s, const cJSON *a, const cJSON *b);

/* Returns whether `b` rejects every object of `a` that has the member. True only where that is
 * certain: both declare it with schemas that exclude each other, or `b` forbids members that it
 * does not declare. */
bool schema_member_decides(struct schema *s, const cJSON *a, const cJSON *b, const char *name);
/* Returns a member for which schema_member_decides(a, b) is true: one whose values a const or enum
 * gives (`given`), or one that `a` requires; NULL: none. */
const char *schema_deciding_member(struct schema *s, const cJSON *a, const cJSON *b, bool given);
/* Returns whether `name`, a value in the discriminator of the schema `at`, means the branch: it
 * refers to the same schema, or is the last part of the branch's own reference. */
bool schema_is_branch(struct schema *s, const cJSON *at, const cJSON *branch, const char *name);

#endif
