"""The privacy ledger: one account per private data set, which outlives every run, ensemble and student."""

from pate_torch.ledger.accounts import Account as Account
from pate_torch.ledger.ledger import BudgetExceeded as BudgetExceeded
from pate_torch.ledger.ledger import Ledger as Ledger
from pate_torch.ledger.ledger import LedgerError as LedgerError
from pate_torch.ledger.ledger import get_default_path as get_default_path
