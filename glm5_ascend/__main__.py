"""`python -m glm5_ascend` does what `glm5-ascend` does."""

from glm5_ascend.cli import main

if __name__ == "__main__":
    main()
