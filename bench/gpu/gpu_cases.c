/* Runs the cases of tests/emu/emu_*.c without Criterion, one after the other.
 *
 *     gpu_cases                                   prints the names of the suites
 *     gpu_cases SUITE [PART]              runs the cases of a suite whose names contain PART
 *     gpu_cases SUITE PART BEGIN LIMIT    the same in child processes
 *
 * With BEGIN and LIMIT no case begins later than BEGIN seconds after the start, one that takes more
 * than LIMIT seconds is ended, and the cases run in a child process, which opens the device once. A
 * case that fails, crashes or hangs ends that child, and the next case begins in a new one: an
 * error of the device is lost with the process that had it. Without them the first failure ends the
 * program, which debuggers and compute-sanitizer can follow. Status 0: all that ran passed. */
#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#define CASES_MAX 512

struct one_case {
    const char *suite, *name;
    void (*run)(void);
};

static struct one_case all_cases[CASES_MAX];
static int case_count;
/* Shared with the children: the case that runs, or the first that did not begin. */
static volatile int *current_case;

void cases_add(const char *suite, const char *name, void (*run)(void)) {
    if (case_count == CASES_MAX) abort();
    all_cases[case_count++] = (struct one_case){suite, name, run};
}

void cases_check(bool good, const char *condition, const char *file, int line, const char *format,
                 ...) {
    if (good) return;
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: %s\n ", file, line, condition);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    _exit(1); /* a device in an unknown state runs no exit handlers */
}

static double cases_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static char **cases_environment(char **from) {
    size_t count = 1; /* NULL at the end */
    while (from[count - 1]) count++;
    char **copy = malloc(count * sizeof *copy);
    if (!copy) abort();
    memcpy(copy, from, count * sizeof *copy);
    return copy;
}

static void print_suites(void) {
    for (int i = 0; i < case_count; i++) {
        bool first = true;
        for (int j = 0; j < i; j++) first &= strcmp(all_cases[j].suite, all_cases[i].suite) != 0;
        if (first) puts(all_cases[i].suite);
    }
}

/* The cases that run, and for how long. */
struct choice {
    const char *suite, *part;
    double end; /* cases_now */
    int limit;  /* seconds of one case; 0: none */
};

static bool is_chosen(const struct choice *c, int i) {
    return strcmp(all_cases[i].suite, c->suite) == 0 && strstr(all_cases[i].name, c->part);
}

/* The child: cases from `first` on. With Criterion each case is a process; here each begins with
 * the environment of the first one, because some choose an emulated device by variables. */
static _Noreturn void run_from(int first, const struct choice *c) {
    char **begun = cases_environment(environ);
    for (int i = first; i < case_count; i++) {
        if (!is_chosen(c, i)) continue;
        if (cases_now() > c->end) _exit(0);
        *current_case = i;
        environ = cases_environment(begun);
        alarm((unsigned)c->limit);
        double start = cases_now();
        all_cases[i].run();
        alarm(0);
        printf("ok      %s in %.2f s\n", all_cases[i].name, cases_now() - start);
        fflush(stdout);
        *current_case = i + 1;
    }
    *current_case = case_count;
    _exit(0);
}

/* Without a child; the end of the program runs the handlers that tools have set. */
static int run_here(const struct choice *c) {
    char **begun = cases_environment(environ);
    for (int i = 0; i < case_count; i++) {
        if (!is_chosen(c, i)) continue;
        environ = cases_environment(begun);
        all_cases[i].run();
        printf("ok      %s\n", all_cases[i].name);
        fflush(stdout);
    }
    return 0;
}

static void print_failure(int which, int status, int limit) {
    printf("FAILED  %s", all_cases[which].name);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        printf(": no end after %d s\n", limit);
    else if (WIFSIGNALED(status))
        printf(": %s\n", strsignal(WTERMSIG(status)));
    else
        putchar('\n');
    fflush(stdout);
}

/* Returns the number of cases that failed; *next is the first one that did not run. */
static int run_chosen(const struct choice *c, int *next) {
    int failed = 0;
    *next = 0;
    for (;;) {
        *current_case = *next;
        pid_t child = fork();
        if (child < 0) abort();
        if (child == 0) run_from(*next, c);
        int status;
        while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
        *next = *current_case;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return failed;
        if (*next == case_count) return failed + 1; /* the child ended badly after the last case */
        print_failure(*next, status, c->limit);
        failed++;
        (*next)++;
    }
}

int main(int argc, char **argv) {
    if (argc < 2) return print_suites(), 0;
    struct choice c = {.suite = argv[1], .part = argc > 2 ? argv[2] : ""};
    int chosen = 0, waiting = 0, next;
    for (int i = 0; i < case_count; i++) chosen += is_chosen(&c, i);
    if (argc < 5) return chosen ? run_here(&c) : 1;
    c.end = cases_now() + strtod(argv[3], NULL);
    c.limit = atoi(argv[4]);
    current_case =
        mmap(NULL, sizeof *current_case, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (current_case == MAP_FAILED) abort();
    int failed = run_chosen(&c, &next);
    for (int i = next; i < case_count; i++) waiting += is_chosen(&c, i);
    printf("%d of %d cases passed, %d failed, %d did not begin\n", chosen - failed - waiting,
           chosen, failed, waiting);
    return failed || !chosen;
}
