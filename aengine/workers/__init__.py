"""Worker processes: started and watched by the host (`supervisor`), run by `entry` and `worker`."""
