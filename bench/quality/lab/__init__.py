"""The laboratory: what does a bounded cache cost, measured through HTTP on synthetic tasks?

  tasks       what is asked: held-out dialogues, each with a history and questions that fork from it
  plan        which cells exist, what each may hold, and in which order their dialogues run
  client      the daemon: starting one, asking it, reading its metrics
  store       finished dialogues on disk, so that a run can stop and go on
  runner      dialogues of the plan against the daemon, within a time budget
  anatomy     what a method costs and what it keeps: time, memory, positions, lengths
  statistics  cluster bootstrap, paired differences, means over tasks
  report      tables, goals, Markdown and JSON
  plots       SVG

Nothing here knows the daemon's insides; everything is asked the way a client would ask.
"""
