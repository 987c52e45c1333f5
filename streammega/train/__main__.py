"""`torchrun -m streammega.train`: `program`, with an end of one line for Ctrl-C while it is imported."""

import os
import sys


def main() -> int:
    """Run the command line. Ctrl-C is one line here too, while modules are imported."""
    try:
        from streammega.train.program import main as run

        return run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write(f"[{os.environ.get('RANK', '0')}] interrupted\n")
        return 130


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Threads that wait for ranks that are gone keep the process alive. gloo's may abort it at exit.
        os._exit(code)
    sys.exit(code)
