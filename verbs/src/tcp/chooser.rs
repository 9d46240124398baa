//! Which congestion control, how many streams and how large writes: found out by measuring.
//!
//! What is best differs from machine to machine and from path to path (on one of the machines that this was made on, reno
//! is 1.5 times as fast as BBR over loopback; over a path that loses packets it is the other way round), so the end that
//! sends data tries. This is the state machine that decides; time is passed in, and it touches no socket.
//!
//! One question after the other is put: which control; then how many streams; then how large writes. The setting in
//! force stays unless another was faster in *every* round, and clearly faster on the whole: speeds of samples differ by
//! a tenth or two for no reason, and what is nearly as fast may as well be left alone, while the wrong control costs a
//! third. Candidates are measured in turn, and in the opposite order in the next round, so that a slow drift of the
//! machine's speed is nobody's gain. With three controls all this takes about 25 samples: 800 MiB. After [`RECHECK`]
//! bytes one of the questions is put again, and a change has to promise more.

use super::congestion::Control;
use core::time::Duration;

/// Bytes that count, of a sample: some milliseconds on the fastest path there is.
const MEASURED: u64 = 16 << 20;
/// Bytes before those, after a change: what is in the sockets' buffers is the work of the candidate before, and a
/// requester asks for 16 MiB ahead.
const SETTLING: u64 = 16 << 20;
/// Bytes before those, after a rest: the first bytes are fast, as the buffers are empty.
const STARTING: u64 = 16 << 20;
/// A rest at most as long as this, or as the sample so far, belongs to the sample: requests come one after the other.
const REST: Duration = Duration::from_millis(1);
/// Samples of each candidate.
const ROUNDS: usize = 3;
/// How much faster another candidate than the current one has to be in each round.
const EACH: f64 = 1.05;
/// And on the whole.
const MARGIN: f64 = 1.15;
/// The same when everything has been settled before.
const RECHECK_MARGIN: f64 = 1.25;
/// Bytes after which a question is put again.
const RECHECK: u64 = 32 << 30;
/// Sizes of writes, the first to begin with.
const WRITES: [usize; 2] = [1 << 20, 256 << 10];
/// Streams to begin with, where there are so many. Over loopback, operations of 190 MiB in turn, medians: one stream 33.7
/// ms, two 30.3, three 32.2.
const STREAMS: u8 = 2;

/// How data is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) control: Control,
    pub(super) streams: u8,
    /// Most bytes of data in one call.
    pub(super) write: usize,
}

/// What there is to choose from.
#[derive(Debug, Clone)]
pub(super) struct Choices {
    /// The first to begin with.
    pub(super) controls: Vec<Control>,
    /// How many streams can be had with a control, of so many that there are.
    pub(super) streams: fn(Control, u8) -> u8,
    /// Streams there are.
    pub(super) all: u8,
}

/// The questions, in the order in which they are put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Question {
    Control,
    Streams,
    Write,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Chooser {
    choices: Choices,
    best: Setting,
    stage: Stage,
    next_question: Question,
    /// Whether every question has been answered once.
    settled_before: bool,
    /// Since when there has been nothing to send.
    resting_since: Option<Duration>,
}

#[derive(Debug)]
enum Stage {
    Measuring(Trial),
    Settled { sent: u64 },
}

/// A question being answered.
#[derive(Debug)]
struct Trial {
    question: Question,
    /// The first is the current setting.
    candidates: Vec<Setting>,
    /// Bytes a second, by candidate and round.
    rates: Vec<[f64; ROUNDS]>,
    /// Which sample this is, of all candidates together.
    sample: usize,
    /// Bytes that do not count yet.
    skip: u64,
    began: Option<Duration>,
    bytes: u64,
}

impl Chooser {
    /// Begins with the first of all choices, or as `known` to have been best before.
    pub(super) fn new(choices: Choices, known: Option<Setting>) -> Self {
        let first = choices.controls.first().copied().unwrap_or(Control::System);
        let streams = (choices.streams)(first, choices.all).clamp(1, STREAMS);
        let begin = Setting { control: first, streams, write: WRITES[0] };
        let fits = |known: &Setting| {
            choices.controls.contains(&known.control)
                && known.streams <= (choices.streams)(known.control, choices.all)
                && known.streams > 0
        };
        let known = known.filter(fits);
        let mut chooser = Self {
            choices,
            best: known.unwrap_or(begin),
            stage: Stage::Settled { sent: 0 },
            next_question: Question::Control,
            settled_before: known.is_some(),
            resting_since: None,
        };
        if known.is_none() {
            chooser.ask();
        }
        chooser
    }

    /// How to send now.
    pub(super) fn setting(&self) -> Setting {
        match &self.stage {
            Stage::Measuring(trial) => trial.candidates[trial.candidate()],
            Stage::Settled { .. } => self.best,
        }
    }

    /// What has been found best, once everything has been tried.
    pub(super) fn settled(&self) -> Option<Setting> {
        matches!(self.stage, Stage::Settled { .. }).then_some(self.best)
    }

    /// There is nothing to send at `now`.
    pub(super) fn rests(&mut self, now: Duration) {
        self.resting_since.get_or_insert(now);
    }

    /// `bytes` of data have been taken by a socket at `now`; the setting may be another from here on.
    pub(super) fn sent(&mut self, now: Duration, bytes: u64) {
        let rest = self.resting_since.take().map(|since| now.saturating_sub(since));
        match &mut self.stage {
            Stage::Settled { sent } => {
                *sent += bytes;
                if *sent >= RECHECK {
                    self.ask();
                }
            }
            Stage::Measuring(trial) => {
                if trial.sent(now, bytes, rest) {
                    self.answer();
                }
            }
        }
    }

    /// Puts the next question to which there is more than one answer.
    fn ask(&mut self) {
        loop {
            let question = self.next_question;
            let candidates = self.candidates(question);
            if candidates.len() > 1 {
                let rates = vec![[0.0; ROUNDS]; candidates.len()];
                let trial = Trial { question, candidates, rates, sample: 0, skip: STARTING, began: None, bytes: 0 };
                self.stage = Stage::Measuring(trial);
                return;
            }
            if !self.turn_to_next(question) {
                return;
            }
        }
    }

    /// Turns to the question after `question`; `false`, and settled, when all have been put.
    fn turn_to_next(&mut self, question: Question) -> bool {
        self.next_question = match question {
            Question::Control => Question::Streams,
            Question::Streams => Question::Write,
            Question::Write => Question::Control,
        };
        // Later on, one question is enough for a time.
        let done = self.settled_before || question == Question::Write;
        if done {
            self.settled_before |= question == Question::Write;
            self.stage = Stage::Settled { sent: 0 };
        }
        !done
    }

    fn answer(&mut self) {
        let Stage::Measuring(trial) = &self.stage else { return };
        let margin = if self.settled_before { RECHECK_MARGIN } else { MARGIN };
        let best = trial.fastest(margin);
        self.best = trial.candidates[best];
        let question = trial.question;
        if self.turn_to_next(question) {
            self.ask();
        }
    }

    fn candidates(&self, question: Question) -> Vec<Setting> {
        let best = self.best;
        let most = |control| (self.choices.streams)(control, self.choices.all);
        let others: Vec<Setting> = match question {
            Question::Control => self
                .choices
                .controls
                .iter()
                .filter(|control| most(**control) > 0)
                .map(|&control| Setting { control, streams: best.streams.min(most(control)), ..best })
                .collect(),
            Question::Streams => (1..=most(best.control)).map(|streams| Setting { streams, ..best }).collect(),
            Question::Write => WRITES.map(|write| Setting { write, ..best }).to_vec(),
        };
        let mut all = vec![best];
        all.extend(others.into_iter().filter(|other| *other != best));
        all
    }
}

impl Trial {
    /// The candidate that the trial speaks for.
    fn fastest(&self, margin: f64) -> usize {
        let current = self.rates[0];
        let gains = |rates: &[f64; ROUNDS]| -> Option<f64> {
            let each = rates.iter().zip(current).map(|(rate, current)| rate / current);
            let whole = rates.iter().sum::<f64>() / current.iter().sum::<f64>();
            (each.fold(f64::INFINITY, f64::min) >= EACH && whole >= margin).then_some(whole)
        };
        let gains = self.rates.iter().enumerate().filter_map(|(at, rates)| Some((at, gains(rates)?)));
        // Of equals the first.
        gains.rev().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(at, _)| at)
    }

    /// Which candidate the sample is of: 0, 1, 2 and then 2, 1, 0, and again.
    fn candidate(&self) -> usize {
        let count = self.candidates.len();
        let (round, at) = (self.sample / count, self.sample % count);
        if round % 2 == 0 { at } else { count - 1 - at }
    }

    /// Whether this was the last of all samples.
    fn sent(&mut self, now: Duration, bytes: u64, rest: Option<Duration>) -> bool {
        let so_far = self.began.map_or(Duration::ZERO, |began| now.saturating_sub(began));
        if rest.is_some_and(|rest| rest > REST && rest > so_far.saturating_sub(rest)) {
            (self.skip, self.began, self.bytes) = (STARTING, None, 0);
        }
        let Some(began) = self.began else {
            self.skip = self.skip.saturating_sub(bytes);
            if self.skip == 0 {
                self.began = Some(now);
            }
            return false;
        };
        self.bytes += bytes;
        if self.bytes < MEASURED {
            return false;
        }
        let seconds = now.saturating_sub(began).as_secs_f64().max(1e-9);
        let candidate = self.candidate();
        self.rates[candidate][self.sample / self.candidates.len()] = self.bytes as f64 / seconds;
        let before = candidate;
        self.sample += 1;
        (self.began, self.bytes) = (None, 0);
        if self.sample == ROUNDS * self.candidates.len() {
            return true;
        }
        // The turning point measures the same candidate twice: nothing changes, so nothing has to settle.
        self.skip = if self.candidate() == before { 1 } else { SETTLING };
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(controls: &[Control]) -> Choices {
        let streams = |control, all| if control == Control::System { 1 } else { all };
        Choices { controls: controls.to_vec(), streams, all: 2 }
    }

    const CONTROLS: [Control; 3] = [Control::Reno, Control::Cubic, Control::System];

    /// A path on which a setting has a rate; returns how many bytes were sent before everything was settled.
    fn run(chooser: &mut Chooser, now: &mut Duration, rate: &mut dyn FnMut(Setting) -> f64) -> u64 {
        let mut total = 0;
        while chooser.settled().is_none() {
            let bytes = 256 << 10;
            *now += Duration::from_secs_f64(bytes as f64 / rate(chooser.setting()));
            chooser.sent(*now, bytes);
            total += bytes;
            assert!(total < 1 << 32, "it never settles");
        }
        total
    }

    #[test]
    fn the_best_of_all_is_found_within_a_gigabyte() {
        for control in CONTROLS {
            for streams in 1..=(if control == Control::System { 1 } else { 2 }) {
                for write in WRITES {
                    let best = Setting { control, streams, write };
                    let mut chooser = Chooser::new(choices(&CONTROLS), None);
                    let total = run(&mut chooser, &mut Duration::default(), &mut |setting| {
                        let mut rate = 2e9;
                        rate *= if setting.control == control { 1.5 } else { 1.0 };
                        rate *= if setting.streams == streams { 1.2 } else { 1.0 };
                        rate * if setting.write == write { 1.2 } else { 1.0 }
                    });
                    assert_eq!(chooser.setting(), best);
                    assert!((300 << 20..900 << 20).contains(&total), "{total}");
                }
            }
        }
    }

    #[test]
    fn a_slow_drift_of_the_machine_decides_nothing() {
        for direction in [0.999, 1.001] {
            let mut chooser = Chooser::new(choices(&CONTROLS), None);
            let begin = chooser.setting();
            let mut speed = 2e9;
            run(&mut chooser, &mut Duration::default(), &mut |_| {
                speed *= direction;
                speed
            });
            assert_eq!(chooser.setting(), begin, "all are equal but for the drift");
        }
    }

    #[test]
    fn a_difference_within_the_margin_changes_nothing() {
        let mut chooser = Chooser::new(choices(&CONTROLS), None);
        let begin = chooser.setting();
        run(&mut chooser, &mut Duration::default(), &mut |setting| if setting == begin { 1e9 } else { 1.14e9 });
        assert_eq!(chooser.setting(), begin);
    }

    #[test]
    fn noise_alone_seldom_changes_anything_and_never_to_what_is_clearly_slower() {
        let mut seed = 1u64;
        let mut noise = move || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            0.85 + 0.3 * (seed >> 40) as f64 / (1 << 24) as f64
        };
        let mut changed = 0;
        for _ in 0..200 {
            let mut chooser = Chooser::new(choices(&CONTROLS), None);
            let begin = chooser.setting();
            let (mut current, mut factor) = (begin, 1.0);
            run(&mut chooser, &mut Duration::default(), &mut |setting| {
                if setting != current {
                    (current, factor) = (setting, noise());
                }
                if setting.control == Control::System { 0.7e9 * factor } else { 1e9 * factor }
            });
            assert_ne!(chooser.setting().control, Control::System);
            changed += usize::from(chooser.setting() != begin);
        }
        assert!(changed < 20, "{changed} of 200");
    }

    #[test]
    fn one_of_each_needs_no_trial_but_of_writes() {
        let one = Choices { controls: vec![Control::System], streams: |_, _| 1, all: 1 };
        let mut chooser = Chooser::new(one, None);
        let total = run(&mut chooser, &mut Duration::default(), &mut |_| 1e9);
        assert!(total < 256 << 20);
    }

    #[test]
    fn a_long_rest_begins_the_sample_anew_and_a_short_one_is_part_of_it() {
        let mut chooser = Chooser::new(choices(&[Control::Reno, Control::Cubic]), None);
        let first = chooser.setting();
        let mut now = Duration::ZERO;
        // Bursts of 20 MiB with pauses of a second never make a sample of the first candidate.
        for burst in 0..50 {
            for _ in 0..20 {
                now += Duration::from_micros(500);
                chooser.sent(now, 1 << 20);
                assert_eq!(chooser.setting(), first, "burst {burst}");
            }
            chooser.rests(now);
            now += Duration::from_secs(1);
        }
        // The same with pauses of half a millisecond does.
        for _ in 0..40 {
            now += Duration::from_micros(500);
            chooser.sent(now, 1 << 20);
            chooser.rests(now);
            now += Duration::from_micros(500);
        }
        assert_ne!(chooser.setting(), first);
    }

    #[test]
    fn what_is_known_from_before_is_used_at_once_if_it_still_can_be() {
        let known = Setting { control: Control::Cubic, streams: 2, write: WRITES[1] };
        let chooser = Chooser::new(choices(&CONTROLS), Some(known));
        assert_eq!(chooser.settled(), Some(known));
        let chooser = Chooser::new(choices(&[Control::Reno, Control::System]), Some(known));
        assert_eq!((chooser.settled(), chooser.setting().control), (None, Control::Reno));
    }

    #[test]
    fn the_questions_are_put_again_but_rarely_and_one_at_a_time() {
        let mut chooser = Chooser::new(choices(&CONTROLS), None);
        let mut now = Duration::ZERO;
        let mut rate = |setting: Setting| if setting.control == Control::Cubic { 3e9 } else { 2e9 };
        run(&mut chooser, &mut now, &mut rate);
        assert_eq!(chooser.setting().control, Control::Cubic);
        // The path has changed: cubic is the worst now, and it is noticed when its turn comes.
        let rate = |setting: Setting| if setting.control == Control::Cubic { 1e9 } else { 2e9 };
        let (mut settled, mut trying) = (0u64, 0u64);
        for _ in 0..(100u64 << 30) / (1 << 20) {
            let setting = chooser.setting();
            now += Duration::from_secs_f64((1 << 20) as f64 / rate(setting));
            let counter = if chooser.settled().is_some() { &mut settled } else { &mut trying };
            *counter += 1 << 20;
            chooser.sent(now, 1 << 20);
        }
        assert_eq!(chooser.setting().control, Control::Reno);
        assert!(trying > 0 && trying * 100 < settled, "{trying} of {settled}");
    }
}
