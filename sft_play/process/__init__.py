"""What every process needs: how it ends, alone and with those that it starts (`signals`), how a
rank's failure is told (`failures`), the variables that it is given (`environment`), and what is
said while something takes long (`waiting`, which also gives freed memory back to the system).
"""
