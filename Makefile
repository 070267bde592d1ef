# The command face of sft_play. A target has one line here, which is its line of `make help ALL=1`; those that need the
# environment make it first (`setup`). What a target runs, and what is refused before, is in scripts/make.mk; what measures
# the project itself is in benchmarks/Makefile. `make` alone prints these lines:
#> sft_play: fine-tune a language model. First: make train   (a small example, 2 minutes on a CPU)
#> Your own data:
#>   make new   MODEL=Qwen/Qwen3-4B DATA=my.jsonl   writes my.yaml for this machine
#>   make plan  CONFIG=my.yaml    does it fit, how long
#>   make check CONFIG=my.yaml    are the rows right
#>   make train CONFIG=my.yaml    train;   make resume CONFIG=my.yaml   continue
#>   make chat | eval | ship | merge | export        after training
#> SET='train.epochs=1 model.max_seq_len=512' changes settings.
#> make help plan: that target and its variables.   make help ALL=1: every target and variable
include scripts/make.mk

##@ Setup
help: ## Show how to begin; make help TARGET: one target and its variables; ALL=1: all of this
setup: ## Build .venv from requirements.lock (only when it is missing or the pins changed)
setup-unsloth: ## Build .venv-unsloth, the environment of tuning.backend=unsloth, which has pins of its own

##@ Start
new: setup ## Write the run YAML of a model and data, or of another tool's file (MODEL=owner/name DATA=FILE, FROM=their.yaml, OUT=FILE)

##@ Data
process: setup ## Raw files (data/raw) to checked conversations in data/processed, split, with a report
style: setup ## Give processed conversations a system prompt (STYLE="…"), into data/processed_with_style
dapt-docx: setup ## Documents (data/documents: .docx, .pdf, .pptx, .xlsx, .epub, .html, text) to clean text in data/processed_text
render: setup ## Write the text that the model will see, one row per example, with its mask as spans (OUT=FILE)
preview: setup ## Show the tokens of examples, the trained part in colour, here and as a page (N=5, ROW=12, OUT=FILE)
check: setup ## Check config, model, template, data, masks, disk and memory before training; exit code 2 if a run would stop
full-pipeline: setup ## process, style where asked (STYLE="…"), render and check
mask-score: setup ## Score the loss masks of chat templates (TEMPLATES=FOLDER TOKENIZER=FOLDER OUT=FILE)

##@ Train
train: setup ## Fine-tune as CONFIG says (without CONFIG: configs/run_starter.yaml)
train-tb: setup ## The same, with TensorBoard running (TB_PORT, TB_HOST, TB_KEEP=1)
train-and-watch: train-tb ## Another name for train-tb
sweep: setup ## Train every combination of the values that SET lists, those that fit, and compare them (SET='train.learning_rate=1e-4,2e-4 tuning.lora.r=16,64', OUT=FILE)
resume: setup ## Continue the newest unfinished run of CONFIG (RUN=NAME: that run)

##@ Many GPUs
train-distributed: setup ## Fine-tune over all GPUs, or CPU ranks (STRATEGY=ddp|fsdp|zero2|zero3 NPROC=2 GPUS=0,1)
train-distributed-tb: setup ## The same, with TensorBoard running (TB_PORT, TB_HOST, TB_KEEP=1)
train-deepspeed: setup ## The same with DeepSpeed: ZeRO-2, or what DEEPSPEED_CONFIG says
train-deepspeed-tb: setup ## The same with DeepSpeed, with TensorBoard running
launch-command: setup ## Show the command and variables that start the ranks, and start nothing
launch-file: setup ## Write a job that trains CONFIG and resumes after preemption (FOR=slurm, skypilot, kubeflow, hfjobs; HARDWARE=2x8xH100, OUT=FILE)
setup-accelerate: setup ## Write an accelerate configuration for this machine (NUM_MACHINES, MACHINE_RANK, MAIN_IP)
run-notebook: setup ## Run your notebook on several ranks, every cell on each (NOTEBOOK=FILE NPROC=2 GPUS=0,1)
doctor: setup ## Look for problems before a run: versions, drivers, limits, disk, an all-reduce over every rank
consolidate: setup ## Write the last checkpoint of RUN, ZeRO's parts included, as safetensors (OUT=FOLDER)
verify-layouts: setup ## Train the same run under every layout and compare with one process (OUT=FILE, CONFIG=FILE)

##@ After training (RUN=NAME, the newest finished run without it)
chat: setup ## Talk to RUN in the terminal (SYSTEM='You are terse.', TEMPERATURE=0.7; /base switches the adapter off)
infer: setup ## Answer every prompt of INPUT=FILE with RUN, into OUTPUT=FILE; continues where it stopped
serve: setup ## Serve RUN over HTTP with OpenAI's API until Ctrl-C (PORT=8000, HOST=127.0.0.1, ENGINE=vllm)
eval: setup ## Evaluate RUN and its base on held-out rows (SPLIT=val, DATA=FILE, LIMIT=, METRICS=, TASKS=, OUT=FILE)
ship: setup ## Decide whether to ship RUN: better at its task, nothing else lost, merge equal; exit code 0 or 2 (REPLAY=FILE, LIMIT=300)
merge: setup ## Merge RUN's adapter into the weights of its base (DTYPE=bf16, OUT=FOLDER, for QLoRA BASE=original)
merge-test: setup ## Compare RUN's merged model with its adapter on rows of its data (LIMIT=16, OUT=FOLDER)
export: setup ## Write RUN's model for an engine (FORMAT=gguf, ollama or vllm, QUANT=q8_0, LLAMA_CPP=checkout, OUT=FOLDER)
export-test: setup ## Compare RUN's exported GGUF with its adapter: prompts, weights, answers (LIMIT=200, OUT=FOLDER)
push: setup ## Upload RUN's adapter or model to the hub, after asking (REPO=user/name, MERGED=1, PUBLIC=1, YES=1)
report: setup ## Write one page about RUN: curves, predicted and measured, answers, how to reproduce it (OUT=FILE)
compare: setup ## Write one page about several runs: what differs, results, curves (RUNS='first second', OUT=FILE)
reproduce: setup ## Train RUN again from what its folder records, and compare the weights bit for bit
runs: setup ## List all runs: status, last step, best held-out figure, size, age
prune: setup ## Remove runs, after asking (RUNS='first second', CHECKPOINTS=1 only their checkpoints, YES=1)

##@ See
gpu-info: setup ## Show GPUs, driver, topology, host and disk (FULL=1 asks torch, HARDWARE=2xH200 what a plan assumes)
gpu-selftest: setup ## Test this machine's GPUs against the plan: kernels, peaks, speeds, layouts; 10 minutes, or MINUTES= (OUT=FILE)
memory-check: setup ## Show how much memory of each GPU a run uses, and how much was predicted (WATCH=1, RUN=NAME)
tensorboard: setup ## Show the curves of all runs in output.dir (RUN=NAME: of one); stays until tb-stop
tb-open: setup ## Open that page in a browser, or say its address
tb-stop: setup ## Stop this project's TensorBoards (CONFIG=FILE, RUN=NAME: those of that folder)
tb-clean: setup ## Remove the event files of finished runs; asks first (YES=1: does not)

##@ Plan
plan: setup ## Predict memory and speed, choose layout and batch for CONFIG or MODEL (HARDWARE=2xH200, TRACE=1, JSON=1)
memory-model-score: setup ## Score the memory model on measured peaks (PEAKS=FILE.csv OUT=score.json)
bench: setup ## Measure real steps of CONFIG, in turns with another trainer's (PEER=trl STEPS= WARMUP= ROUNDS= OUT=FILE)

##@ Develop
test: setup ## Run the tests (TESTS="tests/test_x.py -k name" chooses)
coverage: setup ## Run the tests and report which lines and branches of sft_play they reach (TESTS= chooses)
fuzz: setup ## Try random run YAMLs, rows, command lines, requests, templates (N= PART= SEED= CASE= OUT=FILE)
lint: setup ## Check style, format and types (ruff, mypy)
format: setup ## Sort imports and format the code (ruff)
clean: ## Remove caches and build leftovers (never .venv, outputs or data)

##@ Variables (from the command line or the environment)
#: CONFIG=FILE              the run YAML
#: SET='a.b=1 c.d=[x, y]'   settings that replace those of CONFIG (new: of what it writes)
#: HARDWARE=2xH200          plan for this machine instead of the present one
#: RUN=NAME                 name or folder of a run (resume, consolidate and whatever works on runs); last: the newest finished one
#: JSON=1                   print one JSON object on standard output, and nothing else there
#: MODEL=owner/name         new, plan: hub id or local folder of the model: of the run YAML to write, or to plan with default settings (in place of CONFIG)
#: FROM=their.yaml          new: a file of axolotl, LLaMA-Factory, TRL or Unsloth, in our terms
#: OUT=FILE                 write the answer to this file too (new: the run YAML)
#: FOR=slurm                launch-file: what schedules the job: slurm, skypilot, kubeflow, hfjobs
#: WHY=1                    plan, check, train: show everything, such as why and what else was compared (train.log always has it)
#: TRACE=1                  plan: confirm the choice by tracing the step (no GPU needed)
#: WHATIF='a.b=1,2 c=x,y'   plan: the plan of every combination
#: MAX=seq_len              plan: the largest that fits (seq_len, batch or model)
#: PRICE=2.5                plan, gpu-info: money per GPU-hour
#: BUDGET=20                plan: money for the run in USD: finds the cheapest and the fastest machine within it, by a dated price list
#: PEAKS=FILE               memory-model-score, benchmark-speed: CSV of measured peaks
#: LAYOUTS=ddp,fsdp         verify-layouts: the layouts to compare
#: MODES=lora               verify-layouts: full, lora, qlora
#: STEPS=4                  verify-layouts, bench: optimizer steps of each run
#: WARMUP=5                 bench: steps before those that are measured
#: ROUNDS=3                 bench: how often each side runs, in turns
#: PEER=trl                 bench: what to compare with: bare, trl, trl-grouped
#: PEER_PYTHON=PATH         bench: the Python that has the peer's package
#: MINUTES=3                gpu-selftest: begin no part after so many; another start with the same OUT continues
#: FULL=1                   gpu-info: start torch too and ask it what it sees
#: WATCH=1                  memory-check: refresh until Ctrl-C
#: RUNS='first second'      compare, prune: names of the runs to compare or to remove
#: CHECKPOINTS=1            prune: remove only the checkpoints of finished runs
#: TRUST=1                  resume, consolidate: read what DeepSpeed stored in a checkpoint even if it could run code (only from people you trust)
#: YES=1                    tb-clean, prune, push: remove or upload without asking
#: FORCE=1                  overwrite files that exist or were edited by hand (commands on data, setup-accelerate, merge, export)
#: STYLE='You are terse.'   style, full-pipeline: the system prompt
#: N=5                      preview, fuzz: how many examples; fuzz: cases of each part
#: ROW=12                   preview: this row of the training file
#: TEMPLATES=FOLDER         mask-score: folder of chat templates
#: TOKENIZER=FOLDER         mask-score, bench-data: folder or hub id of a tokenizer
#: NOTEBOOK=FILE            run-notebook: the notebook (.ipynb) to run on several ranks, from its own folder
#: INPUT=FILE               infer: prompts: one per line (.txt), or rows as training reads them
#: OUTPUT=FILE              infer: where the answers go, as JSONL
#: MAX_NEW_TOKENS=512       chat, infer, eval: longest answer
#: TEMPERATURE=0.7          chat: temperature of sampling; 0 always takes the likeliest token
#: SYSTEM='You are terse.'  chat: the system prompt
#: ENGINE=vllm              serve: what serves: transformers (default), or vllm where it is installed
#: HOST=0.0.0.0             serve: the address to listen on; others than 127.0.0.1 are open to the network
#: PORT=8000                serve: the port; 0 takes any free one
#: DTYPE=bf16               merge: dtype of the merged weights: bf16, fp16, fp32
#: BASE=original            merge: for a QLoRA run, the weights to merge into: dequantized, original
#: LIMIT=16                 eval, export-test, merge-test, ship: how many rows, evenly spaced
#: SPLIT=val                eval: which held-out rows: val, test
#: DATA=FILE                eval, new: rows in any format that training reads (new: to train on; eval: to evaluate on)
#: METRICS=rouge_l          eval: metrics of answers: exact_match, rouge_l, chrf, your module:function, or none
#: TASKS=gsm8k,mmlu         eval: tasks of lm-evaluation-harness, in addition
#: TOLERANCE=0.3            ship: nats per token by which the loss on general text and chats may rise
#: REPLAY=FILE              ship: compute the verdict of this ship.json again, without the model
#: FORMAT=gguf              export: what to export for: gguf, ollama, vllm
#: QUANT=q8_0               export: how a GGUF stores weights: f32, f16, bf16, q8_0, q4_k_m and its kin (default: losslessly)
#: LLAMA_CPP=FOLDER         export: a checkout of llama.cpp, in place of the downloaded converter
#: REPO=user/name           push: the repository on the Hugging Face hub
#: MERGED=1                 push: upload the merged model in place of the adapter
#: PUBLIC=1                 push: make the repository public; a new one is private without it
#: STRATEGY=zero2           layout over several ranks: ddp, fsdp, zero1, zero2, zero3, zero2_offload, zero3_offload, …; single, streamed (a base in RAM) on one too
#: NPROC=2                  processes on this node
#: GPUS=0,1                 the GPUs to use
#: NNODES=2                 several nodes, the command once on each (with the next three)
#: NODE_RANK=0              which of them this one is, from 0
#: MASTER_ADDR=HOST         the address of node 0
#: MASTER_PORT=29500        a free port there
#: MAX_RESTARTS=3           train, train-distributed, train-deepspeed, resume: start again so often from the last checkpoint where a process of the run dies (default: 0)
#: DEEPSPEED_CONFIG=FILE    your DeepSpeed file (JSON or YAML)
#: ACCELERATE_CONFIG=FILE   your accelerate configuration
#: NUM_MACHINES=2           setup-accelerate: how many machines
#: MACHINE_RANK=0           setup-accelerate: which of them this one is, from 0
#: MAIN_IP=HOST             setup-accelerate: the address of machine 0
#: MAIN_PORT=29500          setup-accelerate: a free port there
#: INTERACTIVE=1            setup-accelerate: answer accelerate's own questions
#: TB_PORT=6006             TensorBoard's port
#: TB_HOST=127.0.0.1        TensorBoard's address
#: TB_KEEP=1                keep TensorBoard running after the run
#: SEED=0                   mutation-score, fuzz: which sample, or which cases
#: PART=yaml,rows           fuzz: these parts: yaml, rows, words, make, serve, templates
#: CASE=17                  fuzz: this case of PART alone, to repeat what was found
#: ALL=1                    help: every target and variable
#: TESTS='ARGUMENTS'        test, coverage: arguments for pytest
#: TORCH=BUILD              lock, setup, setup-unsloth: the build of torch (cpu, cu126, cu130, rocm7.2, index, auto); for lock its version, X.Y.Z
#: PYTHON=PATH              the Python (3.11 to 3.14) that .venv is built with
#: VENV=PATH                use this environment of yours; it is never built or changed
#: UNSLOTH_VENV=PATH        the environment that has Unsloth, if it is not .venv-unsloth

##@ Examples
#: make train
#: make plan CONFIG=configs/run_starter.yaml HARDWARE=2xH200
#: make train CONFIG=my.yaml SET='train.epochs=1 model.max_seq_len=1024'
#: make test TESTS='tests/test_makefile.py -k help'
