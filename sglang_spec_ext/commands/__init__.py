"""The subcommands of `spec-ext`, one module each.

`configure(parser)` adds its arguments, `run(args)` returns the exit status.
"""
