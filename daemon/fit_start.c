#include "daemon/fit_start.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/fit.h"
#include "daemon/progress.h"
#include "server/systemd.h"

/* Microseconds without progress until systemd ends the start: a text of a large model needs
 * minutes. */
#define FIT_START_EXTENDS "900000000"

enum { LINE = 128, CHILD_FITTED = 0, CHILD_FAILED = 1, CHILD_FOUND = 3 };

/* ---- Folders ---- */

bool fit_cache_folder(const char *given, char *out, size_t size) {
    const char *service = getenv("CACHE_DIRECTORY"), *user = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    int n = 0;
    if (given)
        n = snprintf(out, size, "%s", given);
    else if (service && service[0] == '/') /* the first folder of several */
        n = snprintf(out, size, "%.*s/gates", (int)strcspn(service, ":"), service);
    else if (user && user[0] == '/')
        n = snprintf(out, size, "%s/keepd/gates", user);
    else if (home && home[0] == '/')
        n = snprintf(out, size, "%s/.cache/keepd/gates", home);
    return n > 0 && (size_t)n < size;
}

bool fit_make_folder(const char *file) {
    char path[4096];
    char *last;
    if ((size_t)snprintf(path, sizeof path, "%s", file) >= sizeof path ||
        !(last = strrchr(path, '/')))
        return true; /* a file in the working directory has no folder to make */
    *last = '\0';
    for (char *at = path; *at; at++) {
        if (*at != '/' || at == path) continue;
        *at = '\0';
        (void)mkdir(path, 0700);
        *at = '/';
    }
    (void)mkdir(path, 0700);
    return access(path, W_OK | X_OK) == 0;
}

void fit_work_file(const char *gates, char *out, size_t size) {
    snprintf(out, size, "%s.work", gates);
}

/* Opens a file in a folder for temporary files. */
static bool open_temporary(struct fit_start *fit) {
    const char *folder = getenv("TMPDIR");
    const int n = snprintf(fit->folder, sizeof fit->folder, "%s/keepd-gates-XXXXXX",
                           folder && folder[0] == '/' ? folder : "/tmp");
    if ((size_t)n >= sizeof fit->folder || !mkdtemp(fit->folder)) {
        fit->folder[0] = '\0';
        return false;
    }
    snprintf(fit->gates, sizeof fit->gates, "%.*s/gates.safetensors", 4000, fit->folder);
    return true;
}

void fit_start_close(struct fit_start *fit) {
    if (!fit->folder[0]) return;
    (void)unlink(fit->gates);
    (void)rmdir(fit->folder);
    fit->folder[0] = '\0';
}

/* ---- The child ---- */

struct child {
    struct progress progress;
    int out; /* lines of LINE bytes */
};

static void child_note(void *arg, const char *text) {
    const struct child *child = arg;
    char line[LINE] = "";
    snprintf(line, sizeof line, "%s", text);
    if (write(child->out, line, sizeof line) < 0) _exit(CHILD_FAILED); /* nobody reads it */
}

static bool child_load(void *arg, uint64_t done, uint64_t total, const char *what) {
    struct child *child = arg;
    const int64_t before = child->progress.notified_ns;
    progress_note(&child->progress, done, total, what);
    if (child->progress.notified_ns != before) child_note(child, "loading the model");
    return true;
}

static int child_fit(struct child *child, const struct engine_options *options,
                     const struct fit_start *fit, bool kept, const char *work) {
    struct engine_options own = *options;
    struct engine_fitted fitted = {0};
    struct fault fault = {0};
    struct fit_command command = {.out = fit->gates,
                                  .work = kept ? work : NULL,
                                  .how = kept ? ENGINE_FIT_ONCE : ENGINE_FIT_REPLACE,
                                  .minutes = FIT_START_MINUTES,
                                  .seed = 1,
                                  .note = child_note,
                                  .arg = child};
    if (own.device && strcmp(own.device, "cuda") == 0) own.device = "auto"; /* the CPU measures */
    own.progress = child_load;
    own.arg = child;
    int rc = fit_use_calibration(&command, &fault);
    progress_open(&child->progress, PROGRESS_LOADING, isatty(STDERR_FILENO));
    if (!rc) rc = fit_run(&command, &own, stderr, &fitted, &fault);
    if (rc)
        log_error("no gates were fitted: %s%s%s", fault.field, fault.field[0] ? ": " : "",
                  fault.text);
    return rc ? CHILD_FAILED : fitted.found ? CHILD_FOUND : CHILD_FITTED;
}

static void run_child(const struct engine_options *options, const struct fit_start *fit, bool kept,
                      pid_t parent, int out) {
    struct child child = {.out = out};
    char work[4200];
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(CHILD_FAILED);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    unsetenv("NOTIFY_SOCKET"); /* the service manager listens to the parent process */
    fit_work_file(fit->gates, work, sizeof work);
    _exit(child_fit(&child, options, fit, kept, work));
}

/* ---- The parent ---- */

static volatile sig_atomic_t interrupted, terminated;

static void on_fit_signal(int number) {
    if (number == SIGINT && isatty(STDERR_FILENO))
        interrupted = 1;
    else
        terminated = 1;
}

/* Catches SIGINT and SIGTERM, so that waiting calls return. A second SIGINT ends the process. */
static void catch_signals(struct sigaction before[2]) {
    const struct sigaction once = {.sa_handler = on_fit_signal, .sa_flags = (int)SA_RESETHAND};
    const struct sigaction always = {.sa_handler = on_fit_signal};
    sigaction(SIGINT, &once, &before[0]);
    sigaction(SIGTERM, &always, &before[1]);
}

static void tell_manager(const char *line) {
    systemd_notify("STATUS=Fitting retention gates: %s\nEXTEND_TIMEOUT_USEC=" FIT_START_EXTENDS,
                   line);
}

/* Reads lines until the child has ended or must end. Returns its status as waitpid does. */
static int follow_child(pid_t pid, int in) {
    char line[LINE];
    size_t had = 0;
    int status = -1;
    while (!interrupted && !terminated) {
        struct pollfd wait = {.fd = in, .events = POLLIN};
        if (poll(&wait, 1, 1000) <= 0) continue; /* a signal between the test and poll is seen */
        const ssize_t got = read(in, line + had, sizeof line - had);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        had = (had + (size_t)got) % sizeof line;
        line[sizeof line - 1] = '\0';
        if (had == 0) tell_manager(line);
    }
    if (interrupted || terminated) kill(pid, SIGKILL);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
    return status;
}

/* Returns the child's status; -1: the child did not start. */
static int fit_in_child(const struct engine_options *options, const struct fit_start *fit,
                        bool kept) {
    struct sigaction before[2];
    const pid_t parent = getpid();
    int ends[2];
    if (pipe(ends)) return -1;
    fflush(NULL);
    catch_signals(before);
    const pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        run_child(options, fit, kept, parent, ends[1]);
    }
    close(ends[1]);
    const int status = pid < 0 ? -1 : follow_child(pid, ends[0]);
    close(ends[0]);
    sigaction(SIGINT, &before[0], NULL);
    sigaction(SIGTERM, &before[1], NULL);
    return status;
}

static enum fit_start_end fit_end(int status, struct engine_options *options,
                                  const struct fit_start *fit, int64_t began_ns) {
    const bool exited = WIFEXITED(status);
    const int code = exited ? WEXITSTATUS(status) : -1;
    if (terminated) {
        log_info("a signal ends the fit and keepd; texts that were measured are kept for the next "
                 "start, in the cache folder");
        return FIT_START_STOPPED;
    }
    if (interrupted) {
        fputc('\n', stderr);
        log_warn("the fit was skipped: no gates; texts that were measured are kept for the next "
                 "fit, in the cache folder");
        return FIT_START_NONE;
    }
    if (status == -1)
        log_error("no gates were fitted: %s", strerror(errno));
    else if (!exited)
        log_error("no gates were fitted: signal %d (%s) ended the fit%s", WTERMSIG(status),
                  strsignal(WTERMSIG(status)),
                  WTERMSIG(status) == SIGKILL ? "; was there enough memory?" : "");
    if (code != CHILD_FITTED && code != CHILD_FOUND) return FIT_START_NONE;
    if (fit->folder[0]) options->gates = fit->gates;
    options->gates_fitted = code == CHILD_FITTED;
    if (code == CHILD_FITTED)
        log_info("gates were fitted in %.0f s%s%s; keepd fit prints what a budget loses with them",
                 (double)(clock_ns() - began_ns) * 1e-9, fit->folder[0] ? "" : ": ",
                 fit->folder[0] ? "" : fit->gates);
    return FIT_START_FITTED;
}

/* Chooses where to write the file: to the cache or, if that is not possible, to a temporary folder.
 */
static bool choose_file(const char *cached, struct fit_start *fit) {
    if (cached[0] && fit_make_folder(cached)) {
        snprintf(fit->gates, sizeof fit->gates, "%s", cached);
        return true;
    }
    log_warn("gates cannot be kept%s%s%s%s: every start fits them again. Name a folder that can be "
             "written: --gates-cache",
             cached[0] ? " in " : ", because no folder is known", cached, cached[0] ? ": " : "",
             cached[0] ? strerror(errno) : "");
    if (open_temporary(fit)) return true;
    log_error("no gates were fitted: no folder for temporary files ($TMPDIR)");
    return false;
}

enum fit_start_end fit_at_start(struct engine_options *options, struct fit_start *fit) {
    struct engine_found found = {0};
    struct fault fault = {0};
    *fit = (struct fit_start){0};
    if (options->gates || options->random_weights || !engine_wants_gates(options))
        return FIT_START_NONE;
    int rc = engine_find_gates(options, &found, &fault);
    mem_free(found.tool_template);
    if (rc || found.has_gates) return FIT_START_NONE; /* opening the engine reports the reason */
    if (!choose_file(found.gates_cached, fit)) return FIT_START_NONE;
    log_info("the model has no retention gates, which a budget needs: they are fitted to it now, "
             "once, for at most %d minutes. %s--fit never starts without them",
             FIT_START_MINUTES,
             isatty(STDERR_FILENO) ? "Ctrl-C skips this, a second Ctrl-C ends keepd; " : "");
    tell_manager("beginning");
    const int64_t began_ns = clock_ns();
    return fit_end(fit_in_child(options, fit, !fit->folder[0]), options, fit, began_ns);
}
