

        return f"optimizer step: {self.problem}"
