"""The commands of ``pate`` and their arguments. Importing this module imports no command."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from pate_torch.hypotheses import DESCRIPTIONS, LearnOptions
from pate_torch.sites.options import DATA_ARGUMENTS, ENCODER_ARGUMENTS, Argument
from pate_verify import ARGUMENTS as VERIFY_ARGUMENTS

COMMANDS = {
    "demo": ("pate_torch.cli.train", "train on a bundled data set, in half a minute"),
    "train": ("pate_torch.cli.train", "train teachers, release labels and fit a student, as train.py does"),
    "label": ("pate_torch.cli.label", "release labels from a file of votes, without a student"),
    "audit": ("pate_torch.audit", "measure a lower bound on the epsilon of a mechanism"),
    "plan": ("pate_torch.cli.plan", "compute the cost of settings before anything is charged"),
    "diagnose": ("pate_torch.cli.plan", "measure teachers on public data, and recommend K and a mechanism"),
    "verify": ("pate_torch.cli.verify", "recompute the claims of any release by independent code"),
    "owner": ("pate_torch.cli.owner", "write the statements of the owner that releases publish"),
    "ledger": ("pate_torch.cli.ledger", "show, check or copy the privacy ledger, or change a cap"),
    "synthesize": ("pate_torch.cli.synthesize", "release a synthetic table"),
    "site": ("pate_torch.cli.site", "take part in a release of several sites that do not trust each other"),
    "join": ("pate_torch.cli.join", "add up the answers of several sites, and train on the noisy sum"),
    "learn": ("pate_torch.cli.learn", "learn and release a hypothesis by an algorithm of the papers"),
    "predict": ("pate_torch.cli.predict", "predict new records or images by a released student"),
    "export": ("pate_torch.students.store", "export a released student for other programs"),
    "runs": ("pate_torch.cli.list_runs", "list past runs with their epsilon and accuracy"),
}
"""Name of a command -> the module of its function ``main``, and its help."""

SUBCOMMANDS = {
    "ledger": {
        "verify": "recompute every hash, cost and total",
        "show": "list all accounts, or one account with its entries",
        "export": "print every entry as one JSON object per line",
        "backup": "copy the ledger to a new file",
        "move": "move ledger.sqlite to a PostgreSQL database, which several machines can charge",
        "raise-cap": "raise the epsilon cap of an account",
        "close": "close an account, which then accepts no charge",
    },
    "site": {
        "init": "make the keys of a site, and write the key file for the joiner",
        "confirm": "confirm a charter, after people compared its 24 words",
        "answer": "charge the account, and write the masked answer to a round",
    },
    "join": {
        "charter": "write who takes part, and on what terms",
        "keys": "bundle the confirmations of all sites",
        "ask": "write the file of a round",
        "sum": "add up the answers of all sites",
        "train": "train a student or a synthetic table from the newest sum",
    },
}

_NEIGHBORS = "difference between neighbors: a unit more or less, or another record (default: add_remove)"
_JSON = ("--json", dict(action="store_true", help="print one JSON object"))
_SEPARATOR = ("--separator", dict(default=",", help="separator of the values in a CSV file (default: a comma)"))
_OUT = ("--out", dict(type=Path, required=True, help="new folder for everything that may be published"))
_ADJACENCY = ("--adjacency", dict(default="add_remove", choices=("add_remove", "replace_one"), help=_NEIGHBORS))
_STUDENT = ("run", dict(type=Path, help="folder of a run or of a release, or file of a student"))
_VOTES = "votes=FILE (predictions [K, P] or aggregated counts [P, C]), num_classes=, dataset.name=, ..."
_PUBLIC = "file of labeled public records, and settings of train.py and pilot.*"
_NOISE = "continuous noise, or noise of exact integers (default: torch)"
_UNKNOWN = "refuse unknown categories, or encode them as zeros (default: error)"
_TABLE = "file of the private table, and settings of train.py"
_ALGORITHMS = {**DESCRIPTIONS, "bounds": "print the sample size that each algorithm needs"}

_LEDGER = (
    ("--path", dict(type=Path, help="file of the ledger (default: PATE_LEDGER, or ledger.sqlite in the home folder)")),
    _JSON,
)
_ACCOUNT = ("account", dict(help="name of the account"))
_REASON = ("--reason", dict(required=True, help="reason, which the ledger records"))
_SITE = (("--folder", dict(type=Path, default=Path("site"), help="folder of the private keys (default: site)")),)
_JOIN = (("--folder", dict(type=Path, default=Path("join"), help="folder of the joiner (default: join)")),)
_JOIN_PUBLIC = (
    ("--public", dict(type=Path, help="public rows (CSV, Parquet), or images (folder, .npy, .npz)")),
    _SEPARATOR,
)

ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "label": (("settings", dict(nargs="*", metavar="key=value", help=_VOTES)),),
    "audit": (
        ("settings", dict(nargs="+", metavar="key=value", help="mechanism=<name>, and keys of this mechanism")),
        ("--runs", dict(type=int, help="runs on each side of each pair")),
        ("--queries", dict(type=int, help="queries in each run")),
        ("--delta", dict(type=float, default=1e-5, help="delta of the claimed epsilon (default: 1e-05)")),
        ("--confidence", dict(type=float, default=0.95, help="confidence of the lower bound (default: .95)")),
        ("--output", dict(type=Path, help="also write the JSON object to this file, for owner.yaml")),
        _JSON,
    ),
    "plan": (("settings", dict(nargs="*", metavar="PUBLIC | key=value", help=_PUBLIC)), _JSON),
    "verify": VERIFY_ARGUMENTS,
    "owner": (("account", dict(help="name of the account (dataset.name, or account= in Python)")),),
    "learn": (
        ("algorithm", dict(choices=_ALGORITHMS, help="; ".join(f"{key}: {_ALGORITHMS[key]}" for key in _ALGORITHMS))),
        ("settings", dict(nargs="*", metavar="TABLE | key=value", help=_TABLE)),
        *((f"--{option.name}", dict(default=option.default, **option.metadata)) for option in fields(LearnOptions)),
        ("--below-guarantee", dict(action="store_true", help="continue with too few records for the theorem")),
        ("--sweep", dict(metavar="KEY=VALUES", help="epsilon=.1,.5,1 or n=500,1000: risks on public data")),
        ("--repeats", dict(type=int, default=30, help="number of draws of --sweep (default: 30)")),
        ("--output", dict(type=Path, default=Path("sweep"), help="folder of --sweep (default: sweep)")),
        ("--dimension", dict(type=int, default=1, help="bounds: VC dimension, or number of parameters (default: 1)")),
    ),
    "synthesize": (
        ("table", dict(type=Path, help="CSV or Parquet file of private rows")),
        ("--epsilon", dict(type=float, required=True, help="epsilon of the release")),
        ("--account", dict(required=True, help="account of the private rows in the ledger")),
        _OUT,
        ("--schema", dict(type=Path, help="YAML file that declares the columns")),
        ("--public", dict(type=Path, help="file of public rows, off which the columns are read")),
        ("--target", dict(metavar="COLUMN", help="column whose relations with pairs of columns are kept")),
        ("--group", dict(metavar="COLUMN", help="column that names the privacy unit, such as patient")),
        ("--rounds", dict(type=int, default=0, help="rounds of votes for candidate rows (default: 0)")),
        ("--delta", dict(type=float, default=1e-5, help="delta of the guarantee (default: 1e-05)")),
        ("--cap", dict(type=float, help="largest total epsilon of a new account (default: 10)")),
        ("--num-records-about", dict(type=int, help="approximate number of private units, if it is public")),
        _ADJACENCY,
        ("--noise", dict(default="torch", choices=("torch", "discrete"), help=_NOISE)),
        ("--allow-refit", dict(action="store_true", help="charge an account that has been charged already")),
        ("--allow-duplicate-account", dict(action="store_true", help="charge rows that another account has paid for")),
        ("--spend-anyway", dict(action="store_true", help="go on if no table has more signal than noise")),
        _SEPARATOR,
    ),
    "runs": (
        ("--home", dict(type=Path, help="folder that contains runs/ (default: PATE_HOME, or outputs)")),
        ("--dataset", dict(help="list only runs that were charged to this account")),
        ("--json", dict(action="store_true", help="print all keys of the summaries as JSON")),
    ),
    "export": (
        _STUDENT,
        ("--output", dict(type=Path, help="path of the program (default: beside the release folder)")),
        ("--format", dict(default="torch", choices=("torch", "onnx"), help="kind of program (default: torch)")),
    ),
    "predict": (
        _STUDENT,
        ("records", dict(type=Path, help="CSV, Parquet or .npy file, image, or folder of images")),
        ("--id", dict(metavar="COLUMN", help="column that names the rows (default: row numbers)")),
        ("--unknown", dict(default="error", choices=("error", "zeros"), help=_UNKNOWN)),
        _SEPARATOR,
        ("--columns", dict(help="names of the columns, separated by commas, if the file has no header")),
        ("--no-quotes", dict(dest="quotes", action="store_false", help="read quotation marks as part of values")),
        ("--weights", dict(help="file of the encoder's weights, if the release does not contain them")),
        ("--tokenizer", dict(help="file of the encoder's tokenizer, if the release does not contain it")),
        ("--output", dict(type=Path, help="file for the table, .csv or .parquet (default: the terminal)")),
        ("--workers", dict(type=int, default=1, help="number of processes (default: 1)")),
    ),
    "ledger verify": (
        *_LEDGER,
        (
            "--contains",
            dict(metavar="HASH", help="hash of a ledger head that was stored elsewhere and must be in the chain"),
        ),
    ),
    "ledger show": (*_LEDGER, ("account", dict(nargs="?", help="name of the account whose entries are listed"))),
    "ledger export": (
        *_LEDGER,
        ("--output", dict(type=Path, help="new file for the entries (default: the terminal)")),
    ),
    "ledger backup": (*_LEDGER, ("destination", dict(type=Path, help="new file"))),
    "ledger move": (*_LEDGER, ("url", dict(help="postgresql+psycopg://USER@HOST/DATABASE"))),
    "ledger raise-cap": (
        *(*_LEDGER, _ACCOUNT, _REASON),
        ("epsilon", dict(type=float, help="new cap, above the present one")),
    ),
    "ledger close": (*_LEDGER, _ACCOUNT, _REASON),
    "site init": (
        *_SITE,
        ("--account", dict(required=True, help="account of the records in the ledger of this site")),
        ("--name", dict(help="name of the site, for people (default: name of the folder)")),
        ("--slots", dict(type=int, default=16, help="rounds that the keys can answer (default: 16)")),
    ),
    "site confirm": (
        *_SITE,
        ("charter", dict(type=Path, help="charter that the joiner wrote")),
        ("--cap", dict(type=float, required=True, help="largest total epsilon of the account")),
        ("--heard", dict(metavar="WORDS", help="24 words that another site read aloud (default: ask for them)")),
    ),
    "site answer": (
        *_SITE,
        ("round", dict(type=Path, help="round file; its public file lies beside it")),
        *DATA_ARGUMENTS,
        ("--keys", dict(type=Path, help="file that `pate join keys` wrote, for the first round")),
        ("--sum", dict(type=Path, help="sum file of the last round, for a later round")),
    ),
    "join charter": (
        *_JOIN,
        ("files", dict(type=Path, nargs="+", help="key file of each site")),
        ("--colluding", dict(type=int, required=True, help="number t of sites that may collude with the joiner")),
        ("--classes", dict(type=int, default=2, help="number of classes (default: 2)")),
        ("--max-records", dict(type=int, required=True, help="upper bound on the number of all records")),
        _ADJACENCY,
        ("--records", dict(type=int, nargs="+", help="number of records of each site, under replace_one")),
        ("--teachers", dict(type=int, nargs="+", default=[0], help="number of teachers of each site, or of all sites")),
        ("--unit", dict(default="record", help="privacy unit: record, or group:COLUMN (default: record)")),
        ("--max-sites-per-unit", dict(type=int, default=1, help="sites at which a unit may have records (default: 1)")),
        ("--delta", dict(default="1/100000", help="delta, as a fraction (default: 1/100000)")),
        ("--out", dict(type=Path, default=Path("charter.json"), help="file for the sites (default: charter.json)")),
    ),
    "join keys": (
        *_JOIN,
        ("files", dict(type=Path, nargs="+", help="confirmation file of each site")),
        ("--out", dict(type=Path, default=Path("keys.json"), help="file for the sites (default: keys.json)")),
    ),
    "join ask": (
        *_JOIN,
        ("kind", dict(metavar="KIND", help="table: class_sums, gradients, histogram, marginals or votes")),
        ("--epsilon", dict(type=float, required=True, help="largest epsilon of the round, or of all gradient steps")),
        ("--label", dict(help="column of the class")),
        ("--classes", dict(nargs="+", default=[], help="name of each class")),
        ("--questions", dict(type=int, default=100, help="points that histogram or votes ask (default: 100)")),
        ("--teacher", dict(nargs="+", default=[], metavar="KEY=VALUE", help="settings of the teachers of votes")),
        ("--schema", dict(type=Path, help="YAML file that declares the columns of marginals")),
        ("--order", dict(type=int, default=2, help="columns beside the target in a table of marginals (default: 2)")),
        ("--num-records-about", dict(type=int, help="public estimate of all records (default: the charter's bound)")),
        ("--steps", dict(type=int, default=8, help="rounds of gradients; each call asks for one (default: 8)")),
        ("--clip", dict(type=float, default=0.5, help="clipping norm of gradients (default: .5)")),
        ("--again", dict(action="store_true", help="ask for a step whose round failed, at the full cost")),
        *_JOIN_PUBLIC,
        ("--text", dict(metavar="COLUMN", help="column of the texts, if points are texts")),
        ("--encoder", dict(nargs="+", metavar="KEY=VALUE", help="settings of features.encoder.Encoder")),
    ),
    "join sum": (
        *_JOIN,
        ("files", dict(type=Path, nargs="+", help="answer of each site")),
        ("--round", dict(type=int, help="number of an older round (default: the newest)")),
    ),
    "join train": (*_JOIN, *_JOIN_PUBLIC, *ENCODER_ARGUMENTS, _OUT),
}
"""Arguments of the commands and subcommands, except those of Hydra."""
ARGUMENTS["diagnose"] = ARGUMENTS["plan"]
