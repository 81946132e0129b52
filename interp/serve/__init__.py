"""A live page on this machine: a prompt, edits by a click, and what they change; clean and edited side by side.

`asks` reads requests, `changes` and `snippet` turn their edits into `Edit`s and into Python, `session` runs them,
`answers` makes the numbers ready; `desk`, `guard`, `app` and `server` put it on the loopback interface. A request is
data throughout: no code is ever evaluated from one. Needs the extra `serve`.
"""
