"""Groups of SugarCrepe's subsets. Imports nothing, as commands are also printed where no package is installed."""
GROUPS = {
    "add": ("add_att", "add_obj"), "replace": ("replace_att", "replace_obj", "replace_rel"),
    "swap": ("swap_att", "swap_obj")}
