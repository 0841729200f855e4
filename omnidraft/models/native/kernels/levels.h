// How the levels of quantised weights are chosen: minimum + step * level, with a step and a minimum for each channel in
// each group of inputs. A lane is a channel, so its sums run over its inputs in one order and every variant packs the
// same bytes.

#pragma once

#include "simd.h"

namespace {

// The levels of eight channels in one group of inputs.
struct Levels {
    Floats step, minimum, inverse;  // inverse of the step, or zero

    // Rounds a step and a minimum to float16.
    static Levels rounded(Floats step, Floats minimum) {
        step = round_to_float16(step);
        return {step, round_to_float16(minimum), step > 0.f ? 1 / step : Floats{}};
    }
    static Levels chosen(Ints is_first, const Levels& first, const Levels& second) {
        return {is_first ? first.step : second.step, is_first ? first.minimum : second.minimum,
                is_first ? first.inverse : second.inverse};
    }
    ALWAYS_INLINE Floats nearest(Floats weight, int max_level) const {
        return round_to_whole(vmin(vmax((weight - minimum) * inverse, Floats{}), splat((float)max_level)));
    }
};

// The weights of eight channels in one group of inputs, of which a matrix's last group may have less than GROUP_SIZE.
template <int GROUP_SIZE> struct ChannelGroup {
    Floats weights[GROUP_SIZE] = {};
    int size;

    // `stride` is that between channels, of which the last block of a matrix has less than LANES.
    ChannelGroup(const float* from, int channels, size_t stride, int size) : size(size) {
        for (int c = 0; c < channels; c++)
            for (int i = 0; i < size; i++) weights[i][c] = from[c * stride + i];
    }

    // Levels from the least weight to the largest.
    Levels full_range(int max_level) const {
        Floats low = least(), minimum = round_to_float16(low);
        return Levels::rounded(vmax(largest() - minimum, Floats{}) / (float)max_level, minimum);
    }

    // The best of a few: levels of somewhat less or more than the range are given to the weights, and the step and the
    // minimum that suit them best are those of least squares. Where none has a smaller error it is the full range.
    // Weights that were quantised before lie on levels that a group need not use up: with whole numbers they are found.
    Levels least_squares(int max_level) const {
        Levels best = full_range(max_level);
        Floats low = least(), range = vmax(largest() - low, splat(1e-30f)), least_error = squared_error(best, max_level);
        for (float more : {-8.f, -7.f, -6.f, -5.f, -4.f, -3.f, -2.f, -1.f, -.7f, -.4f, -.1f, .2f, .5f, .8f,
                           1.1f, 1.4f}) {
            Levels fitted = fit(low, (max_level + more) / range, max_level);
            Floats error = squared_error(fitted, max_level);
            Ints is_better = error < least_error;
            best = Levels::chosen(is_better, fitted, best);
            least_error = is_better ? error : least_error;
        }
        return best;
    }

  private:
    Floats least() const {
        Floats low = weights[0];
        for (int i = 1; i < size; i++) low = vmin(low, weights[i]);
        return low;
    }
    Floats largest() const {
        Floats high = weights[0];
        for (int i = 1; i < size; i++) high = vmax(high, weights[i]);
        return high;
    }

    // The line of least squares through the weights over the levels that they get at `scale` levels a unit above `low`;
    // equal levels have no slope.
    Levels fit(Floats low, Floats scale, int max_level) const {
        Floats sum{}, sum_levels{}, sum_squares{}, sum_products{};
        for (int i = 0; i < size; i++) {
            Floats above = weights[i] - low, level = round_to_whole(vmin(above * scale, splat((float)max_level)));
            sum += above, sum_levels += level, sum_squares += level * level, sum_products += level * above;
        }
        Floats scatter = sum_squares * (float)size - sum_levels * sum_levels;
        Floats inverse = scatter > 0.f ? 1 / scatter : Floats{};
        Floats step = (sum_products * (float)size - sum * sum_levels) * inverse;
        return Levels::rounded(step, low + (sum_squares * sum - sum_levels * sum_products) * inverse);
    }

    Floats squared_error(const Levels& levels, int max_level) const {
        Floats total{};
        for (int i = 0; i < size; i++) {
            Floats off = levels.nearest(weights[i], max_level) * levels.step - (weights[i] - levels.minimum);
            total += off * off;
        }
        return total;
    }
};

}  // namespace
