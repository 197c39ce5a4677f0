/* `keepd bench` and `keepd fit`: they open the engine that the daemon would open, without a server
 * (daemon/bench.h, daemon/fit.h). Both return the exit status. */
#ifndef KEEPD_DAEMON_COMMANDS_H
#define KEEPD_DAEMON_COMMANDS_H

/* argv[1] is the command. */
int command_bench(int argc, char **argv);
int command_fit(int argc, char **argv);

#endif
