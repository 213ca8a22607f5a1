"""Time predicted from the compiled program: level 5's interpreter with a clock.

The same final text that level 5 executes runs here with a duration for each instruction. Pipes work in order, each
beside the others as far as the program's flags, barriers and cross-core flags allow. The outcome is an estimate
from public rates (`rates`, each with its source), no measurement and no simulator of the chip.

    rates       what a pipe moves or computes per cycle, with sources
    costs       the cycles of one instruction
    timed       one block: when every instruction starts and ends, by pipe
    launches    a launch: a few blocks timed, the rest of the grid by repetition; lower bound beside the estimate
    works       the launches of an op at GLM-5's shapes
    overlap     which pipes work while another one does
    timeline    a block as a picture
"""
