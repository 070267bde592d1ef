"""The resume exam: does a run that was stopped continue as if it had not been?

    python -m tests.resume_exam                    # this toolkit, and TRL's SFTTrainer
    python -m tests.resume_exam kills --runs 10    # kill -9 at random moments, of one process and of ranks

`exam` stops a run at moments where resumes of this year's tools went wrong, and compares the resumed run with the
unbroken one before its first update and after it. `kills` ends processes at random moments and compares what is left.
"""
