/* follower.h: the loop of a process that computes some ranks of a model for host 0: it reads a step or an order (to sleep, to
 * wake, to write weights, to run a tap), carries it out, and answers. */
#ifndef LLMPY_FOLLOWER_H
#define LLMPY_FOLLOWER_H

#include "../step/step_message.h"
#include "team.h"

/* The bounds of the steps of a team. */
struct step_limits team_limits(const struct team *team);
/* Runs steps until host 0 closes its model (RC_OK), a signal ends the wait for a step (RC_CLOSED), or a step fails. */
enum rc follower_run(struct team *team, struct err *err);

#endif
