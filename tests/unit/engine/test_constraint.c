/* The compilation of a language: apart from the thread that asks, at a lower priority, once. */
#include <criterion/criterion.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "engine/steps/constraint.h"

static int calls, priority;
static pid_t lowered;

int __wrap_setpriority(int which, id_t who, int value);
int __wrap_setpriority(int which, id_t who, int value) {
    cr_assert(which == PRIO_PROCESS && who == (id_t)gettid());
    calls++;
    priority = value;
    lowered = (pid_t)who;
    return 0;
}

static size_t letter(const void *arg, int32_t id, const char **bytes) {
    static const char letters[] = "abcdef";
    (void)arg;
    *bytes = letters + id;
    return 1;
}

static int open_regex(struct constraint_table *table, const char *text,
                      struct engine_constraint **out, struct fault *fault) {
    const struct constrain_part part = {
        .kind = CONSTRAIN_REGEX, .field = "f", .text = text, .size = strlen(text)};
    return constraint_open(table, &part, out, fault);
}

/* A table of letters that knows (ab)*c. */
static struct engine_constraint *open_with_one(struct constraint_table *table) {
    const struct constrain_vocabulary v = {6, letter, NULL};
    struct engine_constraint *first;
    struct fault fault = {0};
    constraint_table_open(table, &v);
    cr_assert_eq(open_regex(table, "(ab)*c", &first, &fault), 0, "%s", fault.text);
    return first;
}

Test(constraint, compiles_apart_at_a_lower_priority) {
    struct constraint_table table;
    struct engine_constraint *first = open_with_one(&table), *again, *none;
    struct fault fault = {0};
    cr_expect(calls == 1 && priority == CONSTRAINT_NICE && lowered != gettid());
    cr_assert_eq(open_regex(&table, "(ab)*c", &again, &fault), 0);
    cr_expect(again == first && calls == 1, "a known language is not compiled again");
    cr_expect_eq(open_regex(&table, "(ab", &none, &fault), ERR_INVALID);
    cr_expect(calls == 2 && none == NULL && strcmp(fault.field, "f") == 0 && fault.text[0]);
    constraint_close(&table, first);
    constraint_close(&table, again);
    constraint_table_close(&table);
}

Test(constraint, few_are_compiled_at_the_same_time) {
    struct constraint_table table;
    struct engine_constraint *first = open_with_one(&table), *again, *none;
    struct fault fault = {0};
    cr_expect_eq(table.compiling, 0);
    table.compiling = CONSTRAINTS_AT_ONCE; /* as if other threads did */
    cr_expect_eq(open_regex(&table, "(ab)*d", &none, &fault), ERR_BUSY);
    cr_expect(none == NULL && fault.code == 0);
    cr_assert_eq(open_regex(&table, "(ab)*c", &again, &fault), 0, "a known one does not wait");
    cr_expect_eq(table.compiling, CONSTRAINTS_AT_ONCE);
    constraint_close(&table, first);
    constraint_close(&table, again);
    constraint_table_close(&table);
}
