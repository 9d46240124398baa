//! What machine this is, as far as its speed depends on it.

use serde::{Deserialize, Serialize};
use std::fs;

/// The machine of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Model of the processor.
    pub(crate) cpu: String,
    /// Processors that this process may use.
    pub(crate) cores: usize,
    /// Release of the kernel.
    pub(crate) kernel: String,
    /// Bytes of memory.
    pub(crate) memory_bytes: u64,
    /// Paths that this machine has.
    pub(crate) transports: Vec<String>,
}

impl Machine {
    /// This machine, which has `transports`.
    pub(crate) fn here(transports: Vec<String>) -> Self {
        Self {
            cpu: cpu(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_string(),
            memory_bytes: memory("MemTotal:").unwrap_or(0),
            transports,
        }
    }

    /// One line for a person.
    pub(crate) fn line(&self) -> String {
        let memory = self.memory_bytes as f64 / (1u64 << 30) as f64;
        format!("{}, {} cores, {memory:.1} GiB, Linux {}", self.cpu, self.cores, self.kernel)
    }
}

/// Bytes of memory that can still be had.
pub(crate) fn available_memory() -> Option<u64> {
    memory("MemAvailable:")
}

fn memory(field: &str) -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/meminfo").ok()?, field)
}

fn meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The model of the processor: x86 names it, other architectures give numbers.
fn cpu(cpuinfo: &str) -> String {
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.split(':').next().map(str::trim) == Some(name))?;
        Some(line.split_once(':')?.1.trim().to_string())
    };
    field("model name")
        .or_else(|| {
            let (maker, part) = (field("CPU implementer")?, field("CPU part")?);
            Some(format!("{} implementer {maker} part {part}", std::env::consts::ARCH))
        })
        .unwrap_or_else(|| std::env::consts::ARCH.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_known() {
        let machine = Machine::here(vec!["tcp".into()]);
        assert!(!machine.cpu.is_empty() && machine.cores > 0 && machine.memory_bytes > 1 << 20);
        assert!(machine.kernel.starts_with(|c: char| c.is_ascii_digit()), "{}", machine.kernel);
        assert!(available_memory().unwrap() <= machine.memory_bytes);
        assert!(machine.line().contains(&machine.kernel));
    }

    #[test]
    fn processors_by_name_and_by_number() {
        assert_eq!(cpu("processor\t: 0\nmodel name\t: Fast 9000\n"), "Fast 9000");
        assert!(cpu("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n").ends_with("0x41 part 0xd0c"));
        assert_eq!(cpu(""), std::env::consts::ARCH);
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let text = "MemTotal:       24 kB\nMemFree:         7 kB\n";
        assert_eq!(meminfo(text, "MemTotal:"), Some(24 * 1024));
        assert_eq!(meminfo(text, "MemAvailable:"), None);
    }
}
